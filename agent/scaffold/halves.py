"""Advice on a reference that splits a tile into contiguous parts, such as the halves of its columns.

Such splits are common in PyTorch code, but a kernel can split a tile only into its even and odd columns.
"""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

CUTS = ("chunk", "split", "tensor_split", "split_with_sizes")
JOINS = ("cat", "concat", "concatenate")
SHAPES = ("unflatten", "view", "reshape")
LAST = (-1, 1)  # the axis of columns, counted from either end
ADJACENT = (
    "A kernel can split a tile only into its even and odd columns (pairs), because one thread's registers "
    "hold adjacent columns. Interleave the halves, as specs/gemm_swiglu.yaml does: gate, up, gate, up, ... "
    "To interleave a tile's columns, interleave the rows of its weight. "
)
PARTS = (
    "A kernel can return contiguous columns as an output: column_range(t, first, width). It can also select "
    "columns: in_columns(t, first, width). Both widths must be products or sums of static dims. No other "
    "operator takes a part of a tile. specs/gemm_qkv_rope.yaml is an example."
)
UNLIKE = "A kernel cannot join tiles of unlike widths; return each tile as an output"
ROTATED = (
    "rotates contiguous halves, as a rotary embedding does. A kernel rotates adjacent columns, as "
    "specs/gemm_rope.yaml does. When you load the weight, interleave the rows of each head's two halves. "
    "The result's columns are then interleaved too; a product of queries and keys stays the same. "
)

Swap = tuple[str, str]  # a text and its replacement


@dataclass(frozen=True)
class Advice:
    """Advice on the code at ``place``. ``text`` says what a kernel can do instead. ``swaps`` are replacements
    that make the reference follow the advice. ``otherwise`` is the advice to give instead if the reference
    with these replacements does not run, or if the shape of an output changes."""

    place: ast.AST
    text: str
    swaps: tuple[Swap, ...] = ()
    otherwise: str = ""


def halves(statements: Sequence[ast.stmt], weights: Collection[str]) -> Iterator[Advice]:
    """Yield advice on each split of a tile's columns or a weight's rows into contiguous parts, and on each
    concatenation of two tiles."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (advice := _called(node, statement, weights)):
                yield advice
    yield from _sliced(statements, weights)


def _called(node: ast.Call, statement: ast.stmt, weights: Collection[str]) -> Advice | None:
    """Return advice on a call such as ``z.chunk(2, -1)``, ``torch.split(z, n, dim=-1)`` or
    ``torch.cat((a, b), -1)``."""
    match node.func:
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            args = node.args
        case ast.Attribute(value=base, attr=name):
            args = [base, *node.args]
        case _:
            return None
    keywords = {k.arg: k.value for k in node.keywords}
    if name in JOINS:
        dim = _dim(args[1:2], keywords)
        match args[:1]:
            case [ast.Tuple(elts=[a, b]) | ast.List(elts=[a, b])] if dim in LAST:
                return _joined(node, a, b)
        return None
    names, code = _targets(node, statement), ast.unparse(node)
    if name == "unbind" and args:
        contiguous = len(names) > 2 and _blocks(args[0], len(names))
        return Advice(node, _parts(code, len(names))) if contiguous else None
    if name not in CUTS or not args:
        return None
    sizes = args[1:2] or [v for k, v in keywords.items() if k not in ("dim", "input", "tensor")]
    count, equal = _count(name, sizes, names)
    dim = _dim(args[2:3], keywords)
    rows = dim == 0 and isinstance(args[0], ast.Name) and args[0].id in weights
    if not (rows or dim in LAST) or count < 2:
        return None
    if count > 2 or not equal:
        return Advice(node, _parts(code, count))
    base, prefix = args[0], "" if rows else ":, " if dim == 1 else "..., "
    swap = code, f"(({ast.unparse(base)})[{prefix}0::2], ({ast.unparse(base)})[{prefix}1::2])"
    text = _rows(code, base) if rows else _columns(code, base, prefix[:-2], names)
    return Advice(node, text, (swap,), _parts(code, 2))


def _dim(args: Sequence[ast.expr], keywords: dict[str | None, ast.expr]) -> int | None:
    node = next(iter(args), None) or keywords.get("dim", ast.Constant(0))
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _count(name: str, sizes: Sequence[ast.expr], names: list[str]) -> tuple[int, bool]:
    """Return the number of parts of a split, and whether all parts can have the same size. ``sizes``: the
    arguments for the number or the sizes of the parts. If these arguments do not show the number of parts,
    count the assigned ``names``."""
    match next(iter(sizes), None):
        case ast.Constant(value=int() as count) if name in ("chunk", "tensor_split"):
            return count, True
        case ast.Tuple(elts=sizes) | ast.List(elts=sizes):
            if name == "tensor_split":
                return len(sizes) + 1, True
            return len(sizes), len({ast.dump(size) for size in sizes}) == 1
    return len(names), True


def _blocks(node: ast.expr, count: int) -> bool:
    """Return whether an expression is a view with ``count`` contiguous blocks, such as
    ``z.unflatten(-1, (count, -1))``."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[*args]) if name in SHAPES:
            last = args[-1] if args else None
            sizes = last.elts if isinstance(last, ast.Tuple | ast.List) else args
            return any(isinstance(s, ast.Constant) and s.value == count for s in sizes[:-1])
    return False


def _parts(code: str, count: int) -> str:
    number = {2: "two", 3: "three", 4: "four"}.get(count, str(count))
    return f"{code} takes {number} contiguous parts. {PARTS}"


def _targets(node: ast.Call, statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=[*names])], value=value) if value is node:
            return [ast.unparse(name) for name in names]
    return []


def _columns(code: str, base: ast.expr, prefix: str, names: Sequence[str]) -> str:
    tile = ast.unparse(base) if isinstance(base, ast.Name) else "z"
    cut = f"{tile}[{prefix}, 0::2], {tile}[{prefix}, 1::2]"
    instead = f"{', '.join(names)} = {cut}" if len(names) == 2 else cut
    return f"{code} takes contiguous halves. {ADJACENT}Then write:\n{instead}"


def _rows(code: str, base: ast.expr) -> str:
    weight = ast.unparse(base)
    return (
        f"{code} takes contiguous halves of a weight's rows. {ADJACENT}Then compute one product with all of "
        f"{weight}:\nz = x @ {weight}.mT, then z[:, 0::2], z[:, 1::2]"
    )


def _joined(node: ast.Call, a: ast.expr, b: ast.expr) -> Advice:
    concatenation = ast.unparse(node)
    one, other = (ast.unparse(_Adjacent().visit(copy.deepcopy(part))) for part in (a, b))
    code = f"torch.stack(({one}, {other}), -1).flatten(-2)"
    swap = concatenation, f"torch.stack(({ast.unparse(a)}, {ast.unparse(b)}), -1).flatten(-2)"
    if tables := _tables(a):
        text = f"{concatenation} {ROTATED}{tables} Then write:\n{code}"
        return Advice(node, text, (swap,), f"{concatenation}: {UNLIKE}.")
    text = (
        f"{concatenation} puts two tiles side by side. A kernel can only interleave their columns (join), as "
        f"for specs/gemm_swiglu_bwd.yaml. If the output may have interleaved columns, write:\n{code}"
    )
    return Advice(node, text, (swap,), f"{concatenation} puts tiles side by side. {UNLIKE}.")


def _tables(first: ast.expr) -> str:
    """Return advice on a rotation's cosines and sines. Return "" if ``first``, the first concatenated tile,
    is not part of a rotation."""
    match first:
        case ast.UnaryOp(op=ast.USub()):  # a negated half, later multiplied by the sine
            return (
                "Interleave the columns of cos and sin too: replace torch.cat((f, f), -1) by "
                "f.repeat_interleave(2, -1)."
            )
        case ast.BinOp(ast.BinOp(op=ast.Mult(), right=c), ast.Sub(), ast.BinOp(op=ast.Mult(), right=s)):
            cosine, sine = ast.unparse(c), ast.unparse(s)
            return (
                f"{cosine} and {sine} have one value per pair and stay as they are; one table with their "
                "columns interleaved also works."
            )
    return ""


class _Adjacent(ast.NodeTransformer):
    """Replaces the contiguous halves ``z[..., :n]`` and ``z[..., n:]`` by the even and the odd columns."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node.slice:
            case ast.Tuple(elts=[*before, ast.Slice(lower=lower, upper=upper, step=None)]):
                if (lower is None) != (upper is None):
                    first = ast.Constant(0 if lower is None else 1)
                    node.slice = ast.Tuple([*before, ast.Slice(first, None, ast.Constant(2))], ast.Load())
        return node


def _sliced(statements: Sequence[ast.stmt], weights: Collection[str]) -> Iterator[Advice]:
    """Yield advice on a tile that is split into two or more parts by slices, such as ``z[:, :n]`` and
    ``z[:, n:]``."""
    parts: dict[tuple[str, str], list[tuple[ast.Subscript, ast.Slice]]] = defaultdict(list)
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(slice=ast.Tuple(elts=[*before, ast.Slice(step=None) as cut])):
                    parts[ast.dump(node.value), ", ".join(map(ast.unparse, before))].append((node, cut))
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(step=None) as cut):
                    if name in weights:
                        parts[ast.dump(node.value), ""].append((node, cut))
    for (_, prefix), slices in parts.items():
        cuts = {ast.unparse(node): (node, cut) for node, cut in slices if cut.lower or cut.upper}
        firsts = [(node, cut) for node, cut in cuts.values() if not cut.lower]
        lasts = [(node, cut) for node, cut in cuts.values() if not cut.upper]
        if not firsts or not lasts:
            continue
        (first, start), (second, end) = firsts[0], lasts[0]
        code = f"{ast.unparse(first)} with {ast.unparse(second)}"
        if len(cuts) > 2 and len(firsts) == len(lasts) == 1:
            yield Advice(first, _parts(", ".join(cuts), len(cuts)))
        elif len(cuts) == 2 and start.upper and end.lower and ast.dump(start.upper) == ast.dump(end.lower):
            text = _columns(code, first.value, prefix, ()) if prefix else _rows(code, first.value)
            base, comma = f"({ast.unparse(first.value)})", f"{prefix}, " if prefix else ""
            one, other = ast.unparse(first), ast.unparse(second)
            same_shape = f"0 * ({one} + {other})"  # this sum fails if the slices have different shapes
            swaps = (one, f"({base}[{comma}0::2] + {same_shape})"), (other, f"{base}[{comma}1::2]")
            yield Advice(first, text, swaps, _parts(code, 2))


def swapped(text: str, swaps: Sequence[Swap]) -> str:
    """Return the reference ``text`` with every swap applied."""

    class Swapper(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.expr) and (new := replacements.get(ast.unparse(node))):
                return ast.parse(new, mode="eval").body
            return self.generic_visit(node)

    replacements = dict(swaps)
    return ast.unparse(ast.fix_missing_locations(Swapper().visit(ast.parse(text))))
