"""Advice on a reference that splits a tile into contiguous parts, such as halves of its columns. PyTorch code
often does this, but a kernel can only use a tile's even and odd columns as parts."""

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
    "The vocabulary has no such cut: its pairs takes adjacent columns apart, since both then lie in one "
    "thread's registers. So store the two interleaved (gate, up, gate, up, ...; of a weight, its rows)"
)
EXAMPLE = "as specs/gemm_swiglu.yaml does"
PARTS = (
    "A kernel returns a block of a tile's columns as an output of its own with column_range(t, first, "
    "width), and chooses by columns with in_columns, for a spec such as specs/gemm_qkv_rope.yaml: widths are "
    "made of static dims. Nothing else takes a block: reductions and further products are of whole tiles"
)
UNLIKE = "No kernel joins tiles of unlike widths; return each as an output"
ROTATED = (
    "rotates contiguous halves, as a rotary embedding does. A kernel rotates adjacent columns, as "
    "specs/gemm_rope.yaml does: interleave the two halves of each head in the weight's rows as it is loaded, "
    "which checkpoints that keep q, k and v apart have copied then anyway (the result's "
    "columns are permuted alike, which a product of queries and keys does not show). "
)

Swap = tuple[str, str]  # a text and its replacement


@dataclass(frozen=True)
class Advice:
    """Advice on the code at ``place``: what a kernel must do instead. ``swaps``: replacements that test the
    advice. It is valid if the changed reference runs and its outputs keep their shapes. ``otherwise``: the
    advice if this test fails."""

    place: ast.AST
    text: str
    swaps: tuple[Swap, ...] = ()
    otherwise: str = ""


def halves(statements: Sequence[ast.stmt], weights: Collection[str]) -> Iterator[Advice]:
    """Advice on each split of a tile's columns or a weight's rows into contiguous parts, and on each
    concatenation of two tiles."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (advice := _called(node, statement, weights)):
                yield advice
    yield from _sliced(statements, weights)


def _called(node: ast.Call, statement: ast.stmt, weights: Collection[str]) -> Advice | None:
    """Advice on ``z.chunk(2, -1)``, ``torch.split(z, n, dim=-1)`` or ``torch.cat((a, b), -1)``."""
    match node.func:
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            given = node.args
        case ast.Attribute(value=base, attr=name):
            given = [base, *node.args]
        case _:
            return None
    keywords = {k.arg: k.value for k in node.keywords}
    if name in JOINS:
        dim = _dim(given[1:2], keywords)
        match given[:1]:
            case [ast.Tuple(elts=[a, b]) | ast.List(elts=[a, b])] if dim in LAST:
                return _joined(node, a, b)
        return None
    names, said = _targets(node, statement), ast.unparse(node)
    if name == "unbind" and given:
        found = len(names) > 2 and _blocks(given[0], len(names))
        return Advice(node, _parts(said, len(names))) if found else None
    if name not in CUTS or not given:
        return None
    sizes = given[1:2] or [v for k, v in keywords.items() if k not in ("dim", "input", "tensor")]
    count, alike = _count(name, sizes, names)
    dim = _dim(given[2:3], keywords)
    rows = dim == 0 and isinstance(given[0], ast.Name) and given[0].id in weights
    if not (rows or dim in LAST) or count < 2:
        return None
    if count > 2 or not alike:
        return Advice(node, _parts(said, count))
    base, prefix = given[0], "" if rows else ":, " if dim == 1 else "..., "
    swap = said, f"(({ast.unparse(base)})[{prefix}0::2], ({ast.unparse(base)})[{prefix}1::2])"
    text = _rows(said, base) if rows else _columns(said, base, prefix[:-2], names)
    return Advice(node, text, (swap,), _parts(said, 2))


def _dim(given: Sequence[ast.expr], keywords: dict[str | None, ast.expr]) -> int | None:
    node = next(iter(given), None) or keywords.get("dim", ast.Constant(0))
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _count(name: str, given: Sequence[ast.expr], names: list[str]) -> tuple[int, bool]:
    """The number of parts of a split, and whether they may be equal. The number comes from the split's
    argument, from its list of sizes, or from the names that receive the parts."""
    match next(iter(given), None):
        case ast.Constant(value=int() as count) if name in ("chunk", "tensor_split"):
            return count, True
        case ast.Tuple(elts=sizes) | ast.List(elts=sizes):
            if name == "tensor_split":
                return len(sizes) + 1, True
            return len(sizes), len({ast.dump(size) for size in sizes}) == 1
    return len(names), True


def _blocks(node: ast.expr, count: int) -> bool:
    """Whether an expression is ``z.unflatten(-1, (count, -1))`` or a similar view, whose blocks are
    contiguous."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[*args]) if name in SHAPES:
            last = args[-1] if args else None
            sizes = last.elts if isinstance(last, ast.Tuple | ast.List) else args
            return any(isinstance(s, ast.Constant) and s.value == count for s in sizes[:-1])
    return False


def _parts(said: str, count: int) -> str:
    number = {2: "two", 3: "three", 4: "four"}.get(count, str(count))
    return f"{said} takes {number} contiguous parts. {PARTS}."


def _targets(node: ast.Call, statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=[*names])], value=value) if value is node:
            return [ast.unparse(name) for name in names]
    return []


def _columns(said: str, base: ast.expr, prefix: str, names: Sequence[str]) -> str:
    tile = ast.unparse(base) if isinstance(base, ast.Name) else "z"
    cut = f"{tile}[{prefix}, 0::2], {tile}[{prefix}, 1::2]"
    instead = f"{', '.join(names)} = {cut}" if len(names) == 2 else cut
    return f"{said} takes contiguous halves. {ADJACENT}, {EXAMPLE}, and write:\n{instead}"


def _rows(said: str, base: ast.expr) -> str:
    weight = ast.unparse(base)
    return (
        f"{said} takes contiguous halves of a weight's rows, which makes two products. {ADJACENT}, "
        f"{EXAMPLE}: one product with all of {weight}, such as\n"
        f"z = x @ {weight}.mT, then z[:, 0::2], z[:, 1::2]"
    )


def _joined(node: ast.Call, a: ast.expr, b: ast.expr) -> Advice:
    said = ast.unparse(node)
    one, other = (ast.unparse(_Adjacent().visit(copy.deepcopy(part))) for part in (a, b))
    code = f"torch.stack(({one}, {other}), -1).flatten(-2)"
    swap = said, f"torch.stack(({ast.unparse(a)}, {ast.unparse(b)}), -1).flatten(-2)"
    if tables := _tables(a):
        return Advice(node, f"{said} {ROTATED}{tables}; write:\n{code}", (swap,), f"{said}: {UNLIKE}.")
    text = (
        f"{said} puts two tiles side by side. The vocabulary's join interleaves their columns, "
        f"as specs/gemm_swiglu_bwd.yaml has it; if they may be stored so, write:\n{code}"
    )
    return Advice(node, text, (swap,), f"{said} puts tiles side by side. {UNLIKE}.")


def _tables(first: ast.expr) -> str:
    """Advice on the cosines and sines of a rotation, recognised by the first concatenated tile; empty if this
    is no rotation."""
    match first:
        case ast.UnaryOp(op=ast.USub()):  # a negated half, later multiplied by the sine
            return (
                "Interleave the columns of cos and sin in the same way: where they are torch.cat((f, f), -1) "
                "make them f.repeat_interleave(2, -1)"
            )
        case ast.BinOp(ast.BinOp(op=ast.Mult(), right=c), ast.Sub(), ast.BinOp(op=ast.Mult(), right=s)):
            cosine, sine = ast.unparse(c), ast.unparse(s)
            return (
                f"{cosine} and {sine}, of one value a pair, stay as they are (or become one table with their "
                "columns interleaved, as that spec has it)"
            )
    return ""


class _Adjacent(ast.NodeTransformer):
    """Replace the contiguous halves ``z[..., :n]`` and ``z[..., n:]`` by the even and the odd columns."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node.slice:
            case ast.Tuple(elts=[*before, ast.Slice(lower=lower, upper=upper, step=None)]):
                if (lower is None) != (upper is None):
                    first = ast.Constant(0 if lower is None else 1)
                    node.slice = ast.Tuple([*before, ast.Slice(first, None, ast.Constant(2))], ast.Load())
        return node


def _sliced(statements: Sequence[ast.stmt], weights: Collection[str]) -> Iterator[Advice]:
    """Advice on a tile that is split by slices, such as ``z[:, :n]`` and ``z[:, n:]``, possibly with further
    parts between."""
    parts: dict[tuple[str, str], list[tuple[ast.Subscript, ast.Slice]]] = defaultdict(list)
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(slice=ast.Tuple(elts=[*before, ast.Slice(step=None) as cut])):
                    parts[ast.dump(node.value), ", ".join(map(ast.unparse, before))].append((node, cut))
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Slice(step=None) as cut):
                    if name in weights:
                        parts[ast.dump(node.value), ""].append((node, cut))
    for (_, prefix), found in parts.items():
        cuts = {ast.unparse(node): (node, cut) for node, cut in found if cut.lower or cut.upper}
        firsts = [(node, cut) for node, cut in cuts.values() if not cut.lower]
        lasts = [(node, cut) for node, cut in cuts.values() if not cut.upper]
        if not firsts or not lasts:
            continue
        (first, start), (second, end) = firsts[0], lasts[0]
        said = f"{ast.unparse(first)} and {ast.unparse(second)}".replace("] and", "] with")
        if len(cuts) > 2 and len(firsts) == len(lasts) == 1:
            yield Advice(first, _parts(", ".join(cuts), len(cuts)))
        elif len(cuts) == 2 and start.upper and end.lower and ast.dump(start.upper) == ast.dump(end.lower):
            text = _columns(said, first.value, prefix, ()) if prefix else _rows(said, first.value)
            base, comma = f"({ast.unparse(first.value)})", f"{prefix}, " if prefix else ""
            one, other = ast.unparse(first), ast.unparse(second)
            alike = f"0 * ({one} + {other})"  # adding the two slices fails unless their shapes are equal
            swaps = (one, f"({base}[{comma}0::2] + {alike})"), (other, f"{base}[{comma}1::2]")
            yield Advice(first, text, swaps, _parts(said, 2))


def swapped(text: str, swaps: Sequence[Swap]) -> str:
    """A reference's text with every swap applied."""

    class Swapper(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.expr) and (new := made.get(ast.unparse(node))):
                return ast.parse(new, mode="eval").body
            return self.generic_visit(node)

    made = dict(swaps)
    return ast.unparse(ast.fix_missing_locations(Swapper().visit(ast.parse(text))))
