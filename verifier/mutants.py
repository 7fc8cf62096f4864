"""Wrong versions of a spec's reference, each by one plausible slip, that the gates must catch.

Two kinds. Wrong mathematics is another text: a program may say it, so the interpreter's run with
unrounded outputs sees it too. Wrong execution is the same text with matmuls or outputs spoilt, as a bad
lowering or a cheat would: only the error gate stands against it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from verifier.reference import Product
from verifier.sizes import TILE
from verifier.spec import Spec

Outputs = dict[str, Tensor]
TAIL = 16  # of K: what one tensor-core instruction multiplies
E4M3_LARGEST = 448.0

# Calls and what an author in a hurry may write instead; {x} is the first argument, {call} the call.
APPROXIMATIONS = {
    "silu": ("hardswish({x})", "({x}) * sigmoid(1.02 * ({x}))", "where(({x}) < -7, 0.0, {call})"),
    "sigmoid": ("hardsigmoid({x})",),
    # The form with erf; Hendrycks' sigmoid; no tail.
    "gelu": ("gelu({x})", "({x}) * sigmoid(1.702 * ({x}))", "where(({x}) < -4.5, 0.0, {call})"),
    "tanh": ("({x}) * (27 + ({x}) ** 2) / (27 + 9 * ({x}) ** 2)", "hardtanh({x})"),
    "exp": ("(1 + ({x}) / 1024) ** 1024",),
    "logsumexp": ("({x}).amax(-1)", "log(exp(({x}) / 2).sum(-1)) * 2"),
    "rsqrt": ("1.0005 * rsqrt({x})",),
    "cos": ("cos(({x}).bfloat16().float())",),
    "sin": ("sin(({x}).bfloat16().float())",),
}


@dataclass(frozen=True)
class Mutant:
    """A wrong version: the reference's text, how its matmuls are done, and what happens to its outputs.

    ``text`` is the reference's own where only the execution is wrong; ``product`` None is the honest one.
    """

    name: str
    text: str
    product: Product | None = None
    after: Callable[[Outputs], Outputs] = dict

    @property
    def spoken(self) -> bool:
        """Whether a program could say it: it is another text."""
        return self.product is None and self.after is dict


def mutants(spec: Spec) -> Iterator[Mutant]:
    """All of them, in a fixed order."""
    text = ast.unparse(ast.parse(spec.reference))
    yield from _wrong_outputs(spec, text)
    yield from _wrong_matmuls(spec, text)
    for name, wrong in (
        *_wrong_sums(text),
        *_wrong_axes(text),
        *_wrong_functions(text),
        *_wrong_constants(spec, text),
    ):
        yield Mutant(name, wrong)


# --- outputs ----------------------------------------------------------------------------------------


def _wrong_outputs(spec: Spec, text: str) -> Iterator[Mutant]:
    for name, output in spec.outputs.items():
        yield Mutant(f"{name} zeroed", f"{text}\n{name} = zeros_like({name})")
        yield Mutant(f"{name} times 1.002", f"{text}\n{name} = 1.002 * {name}")
        yield Mutant(f"{name} negated", f"{text}\n{name} = -{name}")
        yield Mutant(f"{name} without its last rows", text, after=_changed(name, _without_last_rows))
        if len(output.shape) > 1:
            flipped = _changed(name, lambda t: _without_last_rows(t.mT).mT)
            yield Mutant(f"{name} without its last columns", text, after=flipped)
            yield Mutant(f"{name} with one wrong column", text, after=_changed(name, _one_wrong_column))
    for a, b in combinations(spec.outputs, 2):
        if (spec.outputs[a].shape, spec.outputs[a].dtype) == (spec.outputs[b].shape, spec.outputs[b].dtype):
            yield Mutant(f"{a} and {b} swapped", f"{text}\n{a}, {b} = ({b}, {a})")


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Outputs], Outputs]:
    return lambda outputs: {**outputs, name: change(outputs[name])}


def _without_last_rows(output: Tensor) -> Tensor:
    """The last tile was never stored."""
    kept = output.clone()
    kept[(output.shape[0] - 1) // TILE * TILE :] = 0
    return kept


def _one_wrong_column(output: Tensor) -> Tensor:
    """One column is its neighbour's."""
    kept, at = output.clone(), output.shape[1] // 2
    kept[:, at] = output[:, at - 1]
    return kept


# --- matmuls ----------------------------------------------------------------------------------------


def _wrong_matmuls(spec: Spec, text: str) -> Iterator[Mutant]:
    yield Mutant(f"the last {TAIL} of K dropped", text, _without_tail)
    yield Mutant("one element of K dropped", text, _without_first)
    if all(t.dtype != "fp8_e4m3" for t in spec.inputs.values()):  # which would lose nothing
        yield Mutant("matmul operands in fp8", text, _in_fp8)
    yield Mutant("matmuls accumulated in bf16", text, _in_bf16)


def _without_tail(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :-TAIL].float() @ b[..., :-TAIL, :].float()


def _without_first(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 1:].float() @ b[..., 1:, :].float()


def _in_fp8(a: Tensor, b: Tensor) -> Tensor:
    return _through_fp8(a) @ _through_fp8(b)


def _through_fp8(t: Tensor) -> Tensor:
    """e4m3, scaled by a power of two to fill its range: what is fp8 already stays as it is."""
    largest = t.float().abs().max().clamp_min(2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(E4M3_LARGEST / largest)))
    return (t.float() * scale).to(torch.float8_e4m3fn).float() / scale


def _in_bf16(a: Tensor, b: Tensor) -> Tensor:
    """As many products as one instruction adds, then a rounding."""
    total = torch.zeros((), dtype=torch.bfloat16, device=a.device)
    for k in range(0, a.shape[-1], TAIL):
        part = a[..., k : k + TAIL].float() @ b[..., k : k + TAIL, :].float()
        total = (total + part).bfloat16()
    return total.float()


# --- texts ------------------------------------------------------------------------------------------


Texts = Iterator[tuple[str, str]]  # name of the slip, text with it
Kind = TypeVar("Kind", bound=ast.expr)


def _wrong_sums(text: str) -> Texts:
    """A term dropped, or its sign flipped."""
    for at, node in _found(text, ast.BinOp):
        if not isinstance(node.op, ast.Add | ast.Sub):
            continue
        shown, other = ast.unparse(node), ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield f"{shown!r} without its first term", _replaced(text, at, node.right)
        yield f"{shown!r} without its second term", _replaced(text, at, node.left)
        flipped = ast.BinOp(left=node.left, op=other, right=node.right)
        yield f"{shown!r} with its sign flipped", _replaced(text, at, flipped)


def _wrong_axes(text: str) -> Texts:
    """A sum, mean or extremum along rows taken along columns, or the other way round."""
    for at, node in _found(text, ast.Call):
        if _name(node) not in ("sum", "mean", "amax", "logsumexp") or not node.args:
            continue
        axis = ast.unparse(node.args[-1])
        if axis in ("0", "-1", "1"):
            other = ast.Constant(-1 if axis == "0" else 0)
            wrong = ast.Call(func=node.func, args=[*node.args[:-1], other], keywords=node.keywords)
            yield f"{ast.unparse(node)!r} along the other axis", _replaced(text, at, wrong)


def _wrong_functions(text: str) -> Texts:
    for at, node in _found(text, ast.Call):
        for template in APPROXIMATIONS.get(_name(node), ()):
            method = isinstance(node.func, ast.Attribute)
            argument = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
            wrong = template.format(x=ast.unparse(argument), call=ast.unparse(node))
            if not method and wrong == ast.unparse(node):
                continue
            yield (
                f"{ast.unparse(node)!r} as {wrong!r}",
                _replaced(text, at, ast.parse(wrong, mode="eval").body),
            )


def _wrong_constants(spec: Spec, text: str) -> Texts:
    """A constant of the spec left out, a mean over the width of a case instead of its own."""
    for at, name in _found(text, ast.Name):
        if name.id in spec.constants:
            yield f"{name.id} as 0", _replaced(text, at, ast.Constant(0.0))
    for at, node in _found(text, ast.Call):
        if _name(node) != "mean" or not isinstance(node.func, ast.Attribute):
            continue
        total = ast.Call(
            func=ast.Attribute(value=node.func.value, attr="sum", ctx=ast.Load()),
            args=node.args,
            keywords=node.keywords,
        )
        for dim, size in spec.cases[0].sizes.items():
            wrong = ast.BinOp(left=total, op=ast.Div(), right=ast.Constant(size))
            yield f"{ast.unparse(node)!r} as if over {dim}={size}", _replaced(text, at, wrong)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _found(text: str, kind: type[Kind]) -> list[tuple[int, Kind]]:
    """Values of a kind, by their place in a walk of the tree; those in an index are no values."""
    tree = ast.parse(text)
    inside = {id(n) for s in ast.walk(tree) if isinstance(s, ast.Subscript) for n in ast.walk(s.slice)}
    return [(i, n) for i, n in enumerate(ast.walk(tree)) if isinstance(n, kind) and id(n) not in inside]


def _replaced(text: str, at: int, new: ast.expr) -> str:
    """The text with the node at that place of a walk replaced."""
    tree = ast.parse(text)
    target = list(ast.walk(tree))[at]

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return copy.deepcopy(new) if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Swap().visit(tree)))
