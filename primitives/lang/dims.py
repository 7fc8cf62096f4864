"""Symbolic sizes: integer polynomials over a spec's dims, such as ``M``, ``2*F`` or ``H*W + 1``.

Types are compared by their polynomials and not by numbers, because two different sizes may be the same number
by chance. Polynomials also show that a tile ``[M, 2*F]`` is twice as wide as a tile ``[M, F]`` for all M and
F. This module needs only the standard library, because the jail (the process that traces a kernel file)
imports it.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
MAX_TEXT = 80
MAX_TERMS = 16  # a limit, because sizes also come from untrusted programs
MAX_SIZE = 1 << 63
Monomial = tuple[str, ...]


class Dim:
    """An integer polynomial, stored as sorted (monomial, coefficient) pairs. It is immutable and hashable."""

    __slots__ = ("names", "terms")

    def __init__(self, terms: Mapping[Monomial, int]):
        self.terms: tuple[tuple[Monomial, int], ...] = tuple(sorted((m, c) for m, c in terms.items() if c))
        self.names = frozenset(name for monomial, _ in self.terms for name in monomial)

    @classmethod
    def parse(cls, text: str | int) -> Dim:
        """Parse a size, such as ``"2*F"``. Raises ValueError for anything but an integer polynomial."""
        if isinstance(text, int) and not isinstance(text, bool):
            if abs(text) >= MAX_SIZE:
                raise ValueError("a number of 2**63 or more is no size")
            return cls({(): text})
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise ValueError(f"{text!r} is no size; write a dim, an integer or a product such as 2*F")
        try:
            made = _built(text)
        except (SyntaxError, RecursionError):
            raise ValueError(
                f"{text!r} is no size; write a dim, an integer or a product such as 2*F"
            ) from None
        if len(str(made)) > MAX_TEXT or any(abs(c) >= MAX_SIZE for _, c in made.terms):
            # ``parse`` could not read a longer text back
            raise ValueError(f"{text!r} multiplies out to too long a size")
        return made

    def __call__(self, sizes: Mapping[str, int]) -> int:
        """The polynomial's value at given sizes. Raises KeyError for a dim without a size."""
        return int(self.value(sizes))

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """The polynomial's value, with numbers or tensors in place of dims."""
        total: Any = 0
        for monomial, product in self.terms:
            for name in monomial:
                product = product * sizes[name]
            total = total + product
        return total

    def at(self, numbers: Mapping[str, int]) -> Dim:
        """The polynomial with numbers in place of some dims."""
        total = Dim({})
        for monomial, coefficient in self.terms:
            factor = coefficient * math.prod(numbers.get(name, 1) for name in monomial)
            total = total + Dim({tuple(name for name in monomial if name not in numbers): factor})
        return total

    def ratio(self, other: Dim) -> tuple[int, int] | None:
        """Return (p, q) in lowest terms such that q * self == p * other at all sizes; None if there is no
        such pair."""
        if not self.terms or len(self.terms) != len(other.terms):
            return None
        pairs = list(zip(self.terms, other.terms, strict=True))
        quotients = {_reduced(a, b) if m == n else None for (m, a), (n, b) in pairs}
        return quotients.pop() if len(quotients) == 1 else None

    def never_negative(self) -> bool:
        """Whether the polynomial is never negative if all dims are at least 1. The test is cautious: it may
        return False for a polynomial that is never negative."""
        total = Dim({})
        for monomial, coefficient in self.terms:
            product = Dim({(): coefficient})
            for name in monomial:
                product = product * Dim({(name,): 1, (): 1})  # a dim is 1 plus something that is not negative
            total = total + product
        return all(coefficient > 0 for _, coefficient in total.terms)

    def divided(self, other: Dim) -> Dim:
        """Return self / other, where ``other`` is a single term such as 2*P. Raises ValueError if the result
        is not an integer polynomial."""
        if len(other.terms) != 1 or other.terms[0][1] < 1:
            raise ValueError(f"{self} is not divisible by {other}")
        ((factors, number),) = other.terms
        terms: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms:
            left = list(monomial)
            for name in factors:
                if name not in left:
                    raise ValueError(f"{self} is not divisible by {other}")
                left.remove(name)
            if coefficient % number:
                raise ValueError(f"{self} is not divisible by {other}")
            terms[tuple(left)] = coefficient // number
        return Dim(terms)

    def __add__(self, other: Dim) -> Dim:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms:
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Dim(terms)

    def __mul__(self, other: Dim) -> Dim:
        terms: dict[Monomial, int] = {}
        for m, a in self.terms:
            for n, b in other.terms:
                key = tuple(sorted(m + n))
                if len(terms) > MAX_TERMS or len(key) > MAX_TERMS:
                    raise ValueError(f"a size of more than {MAX_TERMS} terms or factors")
                terms[key] = terms.get(key, 0) + a * b
        return Dim(terms)

    def __neg__(self) -> Dim:
        return Dim({m: -c for m, c in self.terms})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, coefficient in self.terms:
            factors = list(monomial)
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts)

    def __repr__(self) -> str:
        return f"Dim({self})"


class Unsolvable(ValueError):
    """The error that is raised if no axis determines some dims. ``dims``: all of these dims. ``dim``: the
    first of these dims in alphabetical order."""

    def __init__(self, dims: Collection[str]):
        self.dims, self.dim = frozenset(dims), min(dims)
        super().__init__(f"dim {self.dim!r} follows from no shape")


Shapes = Mapping[str, Sequence[Dim]]


def solving_order(
    shapes: Shapes, dims: Sequence[str], given: Collection[str] = ()
) -> list[tuple[str, str, int]]:
    """Return an order in which to solve for dims, as a list of (dim, tensor, axis). Each dim follows from
    three things: the extent of its axis, the ``given`` dims, and the dims that are earlier in the list.
    Raises Unsolvable if there is no such order."""
    axes = [(d, name, axis) for name, shape in shapes.items() for axis, d in enumerate(shape)]
    order: list[tuple[str, str, int]] = []
    known = set(given)
    while len(known) < len(dims):
        step = next(((u, n, a) for d, n, a in axes if (u := _only_unknown(d, known))), None)
        if step is None:
            raise Unsolvable(set(dims) - known)
        order.append(step)
        known.add(step[0])
    return order


def named_by_callers(shapes: Shapes, dims: Sequence[str], static: Collection[str]) -> tuple[str, ...]:
    """Return the static dims that callers must give by name, because no shape determines these dims. For
    example, these are H and G if all shapes are [(H + 2*G)*W, K]."""
    try:
        solving_order(shapes, dims)
    except Unsolvable as error:
        return tuple(dim for dim in static if dim in error.dims)
    return ()


def _only_unknown(formula: Dim, known: set[str]) -> str | None:
    """Return the unknown dim of a formula if there is exactly one, and the formula is linear in this dim.
    Otherwise, return None."""
    unknown = formula.names - known
    linear = all(m.count(name) <= 1 for m, _ in formula.terms for name in unknown)
    return next(iter(unknown)) if len(unknown) == 1 and linear else None


def solve(
    shapes: Shapes,
    dims: Sequence[str],
    extents: Mapping[str, Sequence[int]],
    given: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Solve for all dims from the ``given`` dims and the extents of the tensors' axes. If extents are symbols
    of torch.compile, the dims are symbols too. Raises ValueError if extents do not fit; the message names an
    input at fault."""
    sizes = dict(given)
    for dim, name, axis in solving_order(shapes, dims, given):
        formula, extent = shapes[name][axis], extents[name][axis]
        rest = formula.value(sizes | {dim: 0})
        step = formula.value(sizes | {dim: 1}) - rest
        if step == 0 or (extent - rest) % step or (extent - rest) // step <= 0:
            empty = "; the tensor is empty, so compute the result without a kernel" if extent == 0 else ""
            raise ValueError(
                f"input {name!r}, axis {axis}: no positive {dim} makes {formula} = {extent}{empty}"
            )
        sizes[dim] = (extent - rest) // step
    for name, shape in shapes.items():
        found, expected = tuple(extents[name]), tuple(d.value(sizes) for d in shape)
        if found != expected:
            said = ", ".join(map(str, shape))
            raise ValueError(f"input {name!r} has shape {found}; [{said}] is {expected} at {sizes}")
    return sizes


def _reduced(a: int, b: int) -> tuple[int, int]:
    common = math.gcd(a, b) * (1 if b > 0 else -1)
    return a // common, b // common


@functools.lru_cache(maxsize=1024)
def _built(text: str) -> Dim:
    return _build(ast.parse(text, mode="eval").body)


def _build(node: ast.expr) -> Dim:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return Dim({(): value})
        case ast.Name(id=name) if NAME.fullmatch(name):
            return Dim({(name,): 1})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _build(left) + _build(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _build(left) + -_build(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _build(left) * _build(right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
    raise ValueError(f"{ast.unparse(node)!r} is no integer polynomial: dims and integers with + - * only")
