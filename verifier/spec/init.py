"""The forms of ``init`` in a spec's YAML. ``init`` gives the distribution of an input.

"Arithmetic over dims" is a number or a text such as ``D**-0.5``, evaluated at a case's sizes.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping
from typing import Self

from pydantic import model_validator

from coda_agent.verifier.spec.fields import Model, fault, instead

Sizes = Mapping[str, int]
WIDTHS = 1e-30, 3e38  # a uniform range is wider than the first and narrower than the second
IGNORED_SHARE = 0.1  # share of an input's values that are the ``ignored`` value


class Normal(Model):
    """A normal distribution with mean zero. ``std`` is a number or arithmetic over dims, such as
    ``D**-0.5``."""

    std: float | str = 1.0

    def at(self, sizes: Sizes) -> float:
        """The standard deviation at these sizes. Raises ValueError if the arithmetic has no positive
        value."""
        return _positive(self.std, sizes)


class Init(Model):
    """The distribution of an input: exactly one of these forms. Only ``integers`` may also have ``ignored``.

    - ``normal: {std: S}``: S is arithmetic over dims.
    - ``uniform: [low, high]``.
    - ``integers: [low, high]``: uniform from low to high - 1, where low and high are arithmetic over dims. If
      ``ignored`` is given, it replaces about one value in ten.
    - ``count: S``: value (or row) i is i % S. S is arithmetic over dims.
    - ``geometric: [low, high]``: value j of n along the last axis is low * (high / low)**(j / n).
    - ``offsets: T``: rising integers from 0 to T, where T is arithmetic over dims. The integers are the first
      row of each expert, and finally the end of the last expert's rows.
    """

    normal: Normal | None = None
    uniform: tuple[float, float] | None = None
    integers: tuple[int | str, int | str] | None = None
    count: int | str | None = None
    geometric: tuple[float, float] | None = None
    ignored: int | None = None
    offsets: int | str | None = None

    @property
    def form(self) -> str:
        """The name of this init's form."""
        return next(iter(self._forms()))

    def range_at(self, sizes: Sizes) -> tuple[int, int]:
        """The least and largest integers that ``integers``, ``count`` or ``offsets`` draw at these sizes,
        except ``ignored``. Raises ValueError if the arithmetic cannot be evaluated or the range is
        invalid."""
        if self.offsets is not None:
            return 0, _integer(self.offsets, sizes, least=1)
        if self.count is not None:
            return 0, _integer(self.count, sizes, least=1) - 1
        low, high = (_integer(bound, sizes) for bound in self.integers or ("none", "none"))
        if low >= high:
            raise ValueError(f"{list(self.integers or ())} is {low} to {high}; low must be less than high")
        if self.ignored is not None and low <= self.ignored < high:
            raise ValueError(
                f"ignored {self.ignored} lies within {low} to {high - 1}; choose a value outside"
            )
        return low, high - 1

    def span_at(self, sizes: Sizes) -> tuple[float, float]:
        """The least and largest values drawn at these sizes, except ``ignored``. For a normal distribution,
        they are minus and plus one standard deviation."""
        if self.normal:
            std = self.normal.at(sizes)
            return -std, std
        if self.uniform or self.geometric:
            low, high = sorted(self.uniform or self.geometric or ())
            return low, high
        return self.range_at(sizes)

    def _forms(self) -> list[str]:
        forms = ("normal", "uniform", "integers", "count", "geometric", "offsets")
        return [form for form in forms if getattr(self, form) is not None]

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if len(self._forms()) != 1:
            raise fault(
                "init takes one form: {normal: {std: D**-0.5}}, {uniform: [0.5, 1.5]}, {integers: [0, V]}, "
                "{count: 8192}, {geometric: [1.0, 1.0e-4]} or {offsets: T}"
            )
        if self.ignored is not None and self.integers is None:
            raise fault("ignored works only with integers: {integers: [0, V], ignored: -100}", "ignored")
        if self.uniform and not (all(map(math.isfinite, self.uniform)) and self.uniform[0] < self.uniform[1]):
            raise fault(f"uniform {list(self.uniform)} must be finite, low then high", "uniform")
        if self.uniform and not WIDTHS[0] < self.uniform[1] - self.uniform[0] < WIDTHS[1]:
            raise fault(f"uniform {list(self.uniform)} is too narrow or too wide to draw in fp32", "uniform")
        if self.geometric and not all(math.isfinite(x) and x > 0 for x in self.geometric):
            raise fault(f"geometric {list(self.geometric)} must be positive and finite", "geometric")
        return self


def _positive(formula: float | str, sizes: Sizes) -> float:
    """Evaluate arithmetic over dims. Raises ValueError unless the value is positive and finite."""
    value = arithmetic(formula, sizes)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{formula!r} is {value}; it must be positive and finite")
    return value


def _integer(formula: int | str, sizes: Sizes, least: int | None = None) -> int:
    """Evaluate arithmetic over dims. Raises ValueError unless the value is an integer of at least
    ``least``."""
    value = arithmetic(formula, sizes)
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{formula!r} is {value}; it must be an integer")
    if least is not None and value < least:
        raise ValueError(f"{formula!r} is {int(value)}; it must be at least {least}")
    return int(value)


def arithmetic(formula: float | str, sizes: Sizes) -> float:
    """Evaluate a number, or arithmetic over dims. Raises ValueError if that fails."""
    if not isinstance(formula, str):
        return float(formula)
    try:
        value = _arithmetic(_parsed(formula), sizes)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{formula!r} has no value ({error})") from None
    except KeyError as error:
        remedy = instead(error.args[0], sizes)
        raise ValueError(f"{formula!r}: dim {error} is not declared; {remedy}") from None
    if isinstance(value, complex):  # a root of a negative number
        raise ValueError(f"{formula!r} is {value}; it must be a real number")
    return value


@functools.lru_cache(maxsize=1024)
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _arithmetic(node: ast.expr, sizes: Sizes) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            return float(sizes[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_arithmetic(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _arithmetic(left, sizes), _arithmetic(right, sizes)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
                case ast.Pow():
                    return a**b
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic; use dims, numbers and + - * / **")
