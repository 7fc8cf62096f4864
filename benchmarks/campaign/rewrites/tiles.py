"""Rewrite reductions, spreads and pairs."""

from __future__ import annotations

from random import Random

from benchmarks.campaign.graph import Graph, Skip
from benchmarks.campaign.rewrites.rules import Rule, known, rule
from coda_agent.primitives.lang.ir import Node
from coda_agent.primitives.lang.signature import Type


@rule("divide")
def _mean(g: Graph, node: Node, random: Random) -> int:
    total, size = node.args
    known(g, total, "row_sums", "column_sums", "head_sums")
    if g.types[size].kind != "scalar":
        raise Skip("no size")
    share = g.add("divide", g.constant(1.0), size)
    summed = g.nodes[total]
    if summed.op != "head_sums" and random.random() < 0.5:
        return g.add(summed.op, g.add("multiply", summed.args[0], share))
    return g.add("multiply", total, share)


@rule("row_abs_max", "column_abs_max")
def _abs_max(g: Graph, node: Node, random: Random) -> int:
    (tile,) = node.args
    plain = node.op.replace("abs_", "")
    if random.random() < 0.5:
        return g.add(plain, g.add("abs", tile))
    low = g.add(plain, g.add("negative", tile))
    return g.add("maximum", g.add(plain, tile), low)


@rule("row_sums", "column_sums")
def _parts(g: Graph, node: Node, random: Random) -> int:
    """Rewrite the sums of a + b as the sums of a plus the sums of b, if a and b are whole tiles."""
    total = known(g, node.args[0], "add")
    if any(g.types[a].kind != "tile" for a in total.args):
        raise Skip("not two tiles")
    return g.add("add", *(g.add(node.op, a) for a in total.args))


@rule("row_sums", "column_sums")
def _scaled(g: Graph, node: Node, random: Random) -> int:
    """Rewrite sum(scale * tile) as scale * sum(tile), or sum(tile) as 4 * sum(tile / 4)."""
    if random.random() < 0.4:
        half = g.add("multiply", node.args[0], g.constant(0.25))
        return g.add("multiply", g.constant(4.0), g.add(node.op, half))
    product = known(g, node.args[0], "multiply")
    kind = "row" if node.op == "row_sums" else "column"
    for scale, tile in (product.args, product.args[::-1]):
        if g.types[scale].kind == kind and g.types[tile].kind == "tile":
            vector = g.nodes[scale].args[0]
            return g.add("multiply", vector, g.add(node.op, tile))
    raise Skip("nothing scales a whole row")


@rule("row_max", "column_max", "row_logsumexp")
def _shifted(g: Graph, node: Node, random: Random) -> int:
    """Rewrite f(t) as f(t - 1) + 1."""
    lower = g.add("subtract", node.args[0], g.constant(1.0))
    return g.add("add", g.add(node.op, lower), g.constant(1.0))


@rule("per_row", "per_column", "multiply", "add")
def _spread(g: Graph, node: Node, random: Random) -> int:
    """Rewrite spread(a + b) as spread(a) + spread(b), or the reverse. Products and other elementwise
    operations are rewritten in the same way."""
    if node.op in ("per_row", "per_column"):
        inner = known(g, node.args[0], "multiply", "add", "subtract", "negative")
        return g.add(inner.op, *(_over(g, node.op, a) for a in inner.args))
    one, other = (known(g, a, "per_row", "per_column") for a in node.args)
    if one.op != other.op:
        raise Skip("spread two ways")
    return g.add(one.op, g.add(node.op, one.args[0], other.args[0]))


def _over(g: Graph, op: str, index: int) -> int:
    return g.add(op, index) if g.types[index].kind == "vector" else index


@rule("even", "odd")
def _behind(g: Graph, node: Node, random: Random) -> int:
    """Take the even or odd columns of a tile before an elementwise operation instead of after it."""
    inner = known(g, node.args[0], "multiply", "add", "subtract", "negative")
    return g.add(inner.op, *(_halved_tile(g, node.op, a) for a in inner.args))


def _halved_tile(g: Graph, op: str, index: int) -> int:
    kind: Type = g.types[index]
    if kind.kind in ("row", "scalar"):
        return index
    if kind.kind not in ("tile", "repeated"):
        raise Skip("it has no halves")
    return g.add(op, index)


@rule("gemm", "multiply", "add", "subtract")
def _joined(g: Graph, node: Node, random: Random) -> int:
    value = g.nodes.index(node)
    if g.types[value].kind != "tile":
        raise Skip("no tile")
    return g.add("join", g.add("even", value), g.add("odd", value))


RULES: dict[str, Rule] = {
    "mean by a reciprocal": _mean,
    "magnitude before the maximum": _abs_max,
    "sum in parts": _parts,
    "scale and sum exchanged": _scaled,
    "maximum below zero": _shifted,
    "spread before or after": _spread,
    "row scale behind pairs": _behind,
    "taken apart and joined": _joined,
}
