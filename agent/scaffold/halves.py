"""Contiguous halves in a reference: usual in PyTorch, but no kernel takes a tile apart there."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

CUTS = ("chunk", "split", "tensor_split", "split_with_sizes")
JOINS = ("cat", "concat", "concatenate")
LAST = (-1, 1)  # where the columns are
ADJACENT = (
    "The vocabulary has no such cut: its pairs takes adjacent columns apart, since both then lie in one "
    "thread's registers. So store the two interleaved (gate, up, gate, up, ...; of a weight, its rows)"
)
EXAMPLE = "as specs/gemm_swiglu.yaml does"


def halves(statements: Sequence[ast.stmt], weights: Collection[str]) -> Iterator[tuple[ast.AST, str]]:
    """(place, what a kernel wants instead) of each cut into two contiguous halves of columns, or of a
    weight's rows, and of each two tiles that are put together so."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (advice := _called(node, statement, weights)):
                yield node, advice
    yield from _sliced(statements, weights)


def _called(node: ast.Call, statement: ast.stmt, weights: Collection[str]) -> str | None:
    """Of ``z.chunk(2, -1)``, ``torch.split(z, n, dim=-1)`` or ``torch.cat((a, b), -1)``."""
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
    names = _targets(node, statement)
    if name not in CUTS or not given or not _two(name, given[1:2] or list(keywords.values()), names):
        return None
    dim = _dim(given[2:3], keywords)
    if dim in LAST:
        return _columns(ast.unparse(node), given[0], ":" if dim == 1 else "...", names)
    rows = dim == 0 and isinstance(given[0], ast.Name) and given[0].id in weights
    return _rows(ast.unparse(node), given[0]) if rows else None


def _dim(given: Sequence[ast.expr], keywords: dict[str | None, ast.expr]) -> int | None:
    node = next(iter(given), None) or keywords.get("dim", ast.Constant(0))
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _two(name: str, given: Sequence[ast.expr], names: list[str]) -> bool:
    """Whether the cut gives two parts: by its number, its list of sizes, or what they are assigned to."""
    match next(iter(given), None):
        case ast.Constant(value=int() as count) if name in ("chunk", "tensor_split"):
            return count == 2
        case ast.Tuple(elts=sizes) | ast.List(elts=sizes):
            return len(sizes) + (name == "tensor_split") == 2
    return len(names) == 2


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


def _joined(node: ast.Call, a: ast.expr, b: ast.expr) -> str:
    one, other = ast.unparse(a), ast.unparse(b)
    return (
        f"{ast.unparse(node)} puts two tiles side by side. The vocabulary's join interleaves their columns, "
        "as specs/gemm_swiglu_bwd.yaml has it; if they may be stored so, write:\n"
        f"torch.stack(({one}, {other}), -1).flatten(-2)"
    )


def _sliced(statements: Sequence[ast.stmt], weights: Collection[str]) -> Iterator[tuple[ast.AST, str]]:
    """Of ``z[:, :n]`` and ``z[:, n:]``."""
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
        ends = {ast.dump(cut.upper): node for node, cut in found if cut.upper and not cut.lower}
        starts = {ast.dump(cut.lower): node for node, cut in found if cut.lower}
        if len(ends) == len(starts) == 1 and ends.keys() == starts.keys():
            (first,), (second,) = ends.values(), starts.values()
            said = f"{ast.unparse(first)} and {ast.unparse(second)}"
            said = said.replace("] and", "] with")
            yield first, _columns(said, first.value, prefix, ()) if prefix else _rows(said, first.value)
