"""Rewrite a reference so that its mathematics has one plausible mistake. A program could contain the same
mistake."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import TypeVar

from coda_agent.primitives.lang.signature import INDICES
from coda_agent.verifier.numerics.sizes import TILE
from coda_agent.verifier.spec.model import Spec

Kind = TypeVar("Kind", bound=ast.expr)
Texts = Iterator[tuple[str, str]]  # the mistake's name, and the text that contains it
# For each axis, the arguments of ``pad`` that precede the number of zeros.
PADDED = {"-1": "0, ", "1": "0, ", "0": "0, 0, 0, "}
REDUCTIONS = ("sum", "mean", "amax", "logsumexp")

# Wrong calls, and approximations that an author in a hurry may write. {x} is the first argument; {call} is
# the correct call.
APPROXIMATIONS = {
    "silu": ("hardswish({x})", "({x}) * sigmoid(1.02 * ({x}))", "where(({x}) < -7, 0.0, {call})"),
    "sigmoid": ("hardsigmoid({x})",),
    # GELU with erf; with sigmoid (Hendrycks); without its tail; and two forms with truncated constants.
    "gelu": (
        "gelu({x})",
        "({x}) * sigmoid(1.702 * ({x}))",
        "where(({x}) < -4.5, 0.0, {call})",
        "0.5 * ({x}) * (1 + tanh(0.7978 * (({x}) + 0.044715 * ({x}) ** 3)))",
        "0.5 * ({x}) * (1 + tanh(0.7978845608 * (({x}) + 0.0447 * ({x}) ** 3)))",
    ),
    "relu": ("leaky_relu({x}, 0.001)",),
    "square": ("{x}",),
    "abs": ("{x}",),
    "tanh": ("({x}) * (27 + ({x}) ** 2) / (27 + 9 * ({x}) ** 2)", "hardtanh({x})"),
    "exp": ("(1 + ({x}) / 1024) ** 1024", "exp2({x})"),
    # The third form subtracts no maximum. The fourth form subtracts a maximum that is never below zero.
    "logsumexp": (
        "({x}).amax(-1)",
        "log(exp(({x}) / 2).sum(-1)) * 2",
        "log(exp({x}).sum(-1))",
        "log(exp({x} - relu({x}.amax(-1, True))).sum(-1)) + relu({x}.amax(-1))",
    ),
    "rsqrt": ("1.0005 * rsqrt({x})",),
    # The second form reduces its argument modulo a period that has too few digits.
    "cos": ("cos(({x}).bfloat16().float())", "cos(({x}) - 6.2832 * round(({x}) / 6.2832))"),
    "sin": ("sin(({x}).bfloat16().float())", "sin(({x}) - 6.2832 * round(({x}) / 6.2832))"),
}


def slips(spec: Spec, text: str) -> Texts:
    """Yield all mutations of the reference, in a fixed order; some may have the same text."""
    yield from _wrong_sums(text)
    yield from _wrong_products(spec, text)
    yield from _wrong_axes(text)
    yield from _wrong_ends(text)
    yield from _wrong_functions(text)
    yield from _wrong_roots(text)
    yield from _wrong_choices(text)
    yield from _wrong_constants(spec, text)
    yield from _wrong_inputs(spec, text)
    yield from _wrong_order(text)
    yield from _wrong_experts(spec, text)
    yield from _rounded_on_the_way(text)


def _wrong_experts(spec: Spec, text: str) -> Texts:
    """Begin each expert's rows one row early or late; give all rows to one expert; drop each expert's last
    row; reorder the experts' matrices; or reorder the gathered rows."""
    for name in (n for n, t in spec.inputs.items() if t.init.offsets is not None):
        ends = f"cat([{name}[:1], {{}}, {name}[-1:]])"
        late, early = f"({name}[1:-1] + 1).clamp(max={name}[-1])", f"({name}[1:-1] - 1).clamp(min=0)"
        yield f"{name} one row late", f"{name} = {ends.format(late)}\n{text}"
        yield f"{name} one row early", f"{name} = {ends.format(early)}\n{text}"
        whole = f"{name}[-1:].expand(len({name}) - 2)"
        yield f"{name} of one expert", f"{name} = {ends.format(whole)}\n{text}"
        for output in (n for n, t in spec.outputs.items() if len(t.shape) == 2):
            last = f"{name}[1:][{name}.diff() > 0] - 1"
            yield f"{output} without each expert's last row", f"{text}\n{output}[{last}] = 0"
    for name in (n for n, t in spec.inputs.items() if len(t.shape) == 3):
        yield f"{name} of experts in reverse", f"{name} = {name}.flip(0)\n{text}"
        yield f"{name} of the next expert", f"{name} = {name}.roll(1, 0)\n{text}"
    for name in (n for n in spec.inputs if f"[{n}]" in text):
        yield f"{name} of the next row", f"{name} = {name}.roll(1)\n{text}"
        yield f"{name} one further", f"{name} = ({name} + 1).clamp(max={name}.max())\n{text}"


def _wrong_sums(text: str) -> Texts:
    """Drop a term, or flip its sign."""
    for at, node in _nodes(text, ast.BinOp):
        if not isinstance(node.op, ast.Add | ast.Sub):
            continue
        shown, other = ast.unparse(node), ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield f"{shown!r} without its first term", _replaced(text, at, node.right)
        yield f"{shown!r} without its second term", _replaced(text, at, node.left)
        flipped = ast.BinOp(left=node.left, op=other, right=node.right)
        yield f"{shown!r} with its sign flipped", _replaced(text, at, flipped)


def _wrong_products(spec: Spec, text: str) -> Texts:
    """Drop a factor of a product; drop the divisor of a quotient, or multiply by the divisor. A product that
    contains only dims is left alone, because it is a shape."""
    for at, node in _nodes(text, ast.BinOp):
        read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if not isinstance(node.op, ast.Mult | ast.Div) or read <= spec.dims.keys():
            continue
        shown = ast.unparse(node)
        yield f"{shown!r} without its second factor", _replaced(text, at, node.left)
        if isinstance(node.op, ast.Mult):
            yield f"{shown!r} without its first factor", _replaced(text, at, node.right)
        else:
            product = ast.BinOp(left=node.left, op=ast.Mult(), right=node.right)
            yield f"{shown!r} as a product", _replaced(text, at, product)


def _wrong_ends(text: str) -> Texts:
    """Make a reduction miss the last value, or include the zeros that pad the last tile."""
    for at, node in _nodes(text, ast.Call):
        axis = ast.unparse(node.args[-1]) if node.args else ""
        if _name(node) not in REDUCTIONS or axis not in PADDED:
            continue
        method = isinstance(node.func, ast.Attribute)
        reduced = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
        values = f"({ast.unparse(reduced)})"
        for slip, wrong in (
            ("without the last", f"{values}.narrow({axis}, 0, {values}.shape[{axis}] - 1)"),
            ("over whole tiles", f"pad({values}, ({PADDED[axis]}-{values}.shape[{axis}] % {TILE}))"),
        ):
            call = f"({wrong}).{_name(node)}({axis})" if method else f"{_name(node)}({wrong}, {axis})"
            yield f"{ast.unparse(node)!r} {slip}", _replaced(text, at, _expression(call))


def _wrong_choices(text: str) -> Texts:
    """Take one branch regardless of the condition, swap the branches, or shift a comparison's boundary."""
    for at, node in _nodes(text, ast.Call):
        if _name(node) != "where" or len(node.args) != 3:
            continue
        shown, (condition, yes, no) = ast.unparse(node), node.args
        yield f"{shown!r} always its first", _replaced(text, at, yes)
        yield f"{shown!r} always its second", _replaced(text, at, no)
        swapped = ast.Call(func=node.func, args=[condition, no, yes], keywords=[])
        yield f"{shown!r} swapped", _replaced(text, at, swapped)
    ends = {ast.GtE: ast.Gt, ast.Gt: ast.GtE, ast.LtE: ast.Lt, ast.Lt: ast.LtE}
    for at, compared in _nodes(text, ast.Compare):
        if other := ends.get(type(compared.ops[0])):
            moved = ast.Compare(left=compared.left, ops=[other()], comparators=compared.comparators)
            yield f"{ast.unparse(compared)!r} as {ast.unparse(moved)!r}", _replaced(text, at, moved)


def _wrong_inputs(spec: Spec, text: str) -> Texts:
    """Replace an input by another input of the same shape, shift a vector by one element, or round an fp32
    input to bf16."""
    for at, name in _nodes(text, ast.Name):
        if not (read := spec.inputs.get(name.id)):
            continue
        for other, tensor in spec.inputs.items():
            if tensor.shape == read.shape and (tensor.dtype in INDICES) == (read.dtype in INDICES):
                yield f"{other} for {name.id}", _replaced(text, at, ast.Name(other, ast.Load()))
        if len(read.shape) == 1:
            yield f"{name.id} one further", _replaced(text, at, _expression(f"{name.id}.roll(1)"))
        if read.dtype == "fp32":
            yield f"{name.id} in bf16", _replaced(text, at, _in_sixteen_bits(name))


def _wrong_order(text: str) -> Texts:
    """Read odd columns in place of even ones, or the reverse; swap two names of one assignment."""
    for at, node in enumerate(ast.walk(ast.parse(text))):
        if isinstance(node, ast.Slice) and node.step and node.lower:
            start = ast.Constant(1 - int(ast.unparse(node.lower)))
            other = ast.Slice(lower=start, upper=node.upper, step=node.step)
            yield f"{ast.unparse(node)} as {ast.unparse(other)}", _replaced(text, at, other)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
            swapped = ast.Tuple(elts=node.elts[::-1], ctx=ast.Store())
            yield f"{ast.unparse(node)} as {ast.unparse(swapped)}", _replaced(text, at, swapped)


def _rounded_on_the_way(text: str) -> Texts:
    """Round an intermediate value to bf16. Values that only matmuls read are left alone, because matmul
    operands are rounded anyway."""
    tree = ast.parse(text)
    products = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult)]
    operands = {id(side) for n in products for side in (n.left, n.right)}
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in operands]
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    assigned = {id(n.value): n.targets[0] for n in tree.body if isinstance(n, ast.Assign)}
    for at, node in enumerate(ast.walk(tree)):
        target = assigned.get(id(node))
        if isinstance(node, ast.expr) and isinstance(target, ast.Name) and target.id in read:
            yield f"{target.id} rounded to bf16", _replaced(text, at, _in_sixteen_bits(node))


def _wrong_axes(text: str) -> Texts:
    """Reduce along columns instead of rows, or the reverse."""
    for at, node in _nodes(text, ast.Call):
        if _name(node) not in REDUCTIONS or not node.args:
            continue
        axis = ast.unparse(node.args[-1])
        if axis in ("0", "-1", "1"):
            other = ast.Constant(-1 if axis == "0" else 0)
            wrong = ast.Call(func=node.func, args=[*node.args[:-1], other], keywords=node.keywords)
            yield f"{ast.unparse(node)!r} along the other axis", _replaced(text, at, wrong)


def _wrong_functions(text: str) -> Texts:
    for at, node in _nodes(text, ast.Call):
        for template in APPROXIMATIONS.get(_name(node), ()):
            argument = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
            wrong = template.format(x=ast.unparse(argument), call=ast.unparse(node))
            yield f"{ast.unparse(node)!r} as {wrong!r}", _replaced(text, at, _expression(wrong))


def _wrong_roots(text: str) -> Texts:
    """Add an eps after the square root instead of before it."""
    for at, node in _nodes(text, ast.Call):
        if _name(node) == "rsqrt" and isinstance(total := node.args[0], ast.BinOp):
            wrong = f"1 / (sqrt({ast.unparse(total.left)}) + {ast.unparse(total.right)})"
            yield f"{ast.unparse(node)!r} as {wrong!r}", _replaced(text, at, _expression(wrong))


def _wrong_constants(spec: Spec, text: str) -> Texts:
    """Replace a constant of the spec by zero, round it to three digits, or multiply it by ten. Replace a
    scalar input by a literal. In a mean, divide the sum by a case's size instead of the actual size."""
    for at, name in _nodes(text, ast.Name):
        if name.id in spec.constants:
            value = spec.constants[name.id]
            for wrong in dict.fromkeys((0.0, float(f"{value:.3g}"), 10 * value)):
                if wrong != value:
                    yield f"{name.id} as {wrong:.3g}", _replaced(text, at, ast.Constant(wrong))
        elif (given := spec.inputs.get(name.id)) and not given.shape and given.init.uniform:
            for wrong in (0.0, *given.init.uniform):
                yield f"{name.id} as {wrong:.3g}", _replaced(text, at, ast.Constant(wrong))
    for at, node in _nodes(text, ast.Call):
        if _name(node) != "mean" or not isinstance(node.func, ast.Attribute):
            continue
        total = ast.Call(
            func=ast.Attribute(value=node.func.value, attr="sum", ctx=ast.Load()),
            args=node.args,
            keywords=node.keywords,
        )
        for dim, size in spec.cases[0].sizes.items():
            divided = ast.BinOp(left=total, op=ast.Div(), right=ast.Constant(size))
            yield f"{ast.unparse(node)!r} as if over {dim}={size}", _replaced(text, at, divided)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _in_sixteen_bits(node: ast.expr) -> ast.expr:
    return _expression(f"({ast.unparse(node)}).bfloat16().float()")


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _nodes(text: str, kind: type[Kind]) -> list[tuple[int, Kind]]:
    """The nodes of a kind, each with its position in a walk of the tree. Nodes inside an index are left
    out."""
    tree = ast.parse(text)
    inside = {id(n) for s in ast.walk(tree) if isinstance(s, ast.Subscript) for n in ast.walk(s.slice)}
    return [(i, n) for i, n in enumerate(ast.walk(tree)) if isinstance(n, kind) and id(n) not in inside]


def _replaced(text: str, at: int, new: ast.expr | ast.Slice) -> str:
    """Replace the node at position ``at`` of the walk (see ``_nodes``), and return the new text."""
    tree = ast.parse(text)
    target = list(ast.walk(tree))[at]

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return copy.deepcopy(new) if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Swap().visit(tree)))
