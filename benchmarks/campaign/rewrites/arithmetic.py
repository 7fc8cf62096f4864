"""Rewrite sums, products, differences and quotients."""

from __future__ import annotations

from random import Random

from benchmarks.campaign.graph import Graph, Skip
from benchmarks.campaign.rewrites.rules import Rule, known, rule
from coda_agent.primitives.lang.ir import Node


@rule("add", "multiply", "maximum", "minimum", "equal", "not_equal")
def _commuted(g: Graph, node: Node, random: Random) -> int:
    return g.add(node.op, node.args[1], node.args[0])


@rule("add", "multiply")
def _associated(g: Graph, node: Node, random: Random) -> int:
    left, right = node.args
    if g.nodes[left].op != node.op:
        left, right = right, left
    first, second = known(g, left, node.op).args
    if random.random() < 0.5:
        first, second = second, first
    return g.add(node.op, first, g.add(node.op, second, right))


@rule("add", "subtract")
def _factored(g: Graph, node: Node, random: Random) -> int:
    one, other = (known(g, a, "multiply").args for a in node.args)
    shared = [a for a in one if a in other]
    if not shared:
        raise Skip("no common factor")
    rest = [args[0] if args[1] == shared[0] else args[1] for args in (one, other)]
    return g.add("multiply", shared[0], g.add(node.op, *rest))


@rule("multiply")
def _distributed(g: Graph, node: Node, random: Random) -> int:
    whole, factor = node.args
    if g.nodes[whole].op not in ("add", "subtract"):
        whole, factor = factor, whole
    total = known(g, whole, "add", "subtract")
    return g.add(total.op, *(g.add("multiply", a, factor) for a in total.args))


@rule("subtract")
def _difference(g: Graph, node: Node, random: Random) -> int:
    a, b = node.args
    match random.randrange(3):
        case 0:
            return g.add("add", a, g.add("negative", b))
        case 1:
            return g.add("add", a, g.add("multiply", b, g.constant(-1.0)))
    return g.add("negative", g.add("subtract", b, a))


@rule("add")
def _sum(g: Graph, node: Node, random: Random) -> int:
    return g.add("subtract", node.args[0], g.add("negative", node.args[1]))


@rule("divide")
def _quotient(g: Graph, node: Node, random: Random) -> int:
    return g.add("multiply", node.args[0], g.add("divide", g.constant(1.0), node.args[1]))


@rule("multiply")
def _product(g: Graph, node: Node, random: Random) -> int:
    """Rewrite a * number as a / (1 / number)."""
    number = [a for a in node.args if g.types[a].kind == "scalar" and g.nodes[a].op == "constant"]
    if not number or not (value := float(g.nodes[number[0]].attribute or 0.0)):
        raise Skip("it has no number")
    other = next(a for a in node.args if a != number[0])
    return g.add("divide", other, g.constant(1 / value))


@rule("multiply")
def _sign(g: Graph, node: Node, random: Random) -> int:
    if random.random() < 0.5:
        return g.add("multiply", *(g.add("negative", a) for a in node.args))
    return g.add("negative", g.add("multiply", g.add("negative", node.args[0]), node.args[1]))


@rule("add", "multiply", "subtract")
def _halved(g: Graph, node: Node, random: Random) -> int:
    left = g.add("multiply", node.args[0], g.constant(2.0))
    if node.op == "multiply":
        return g.add("multiply", g.add("multiply", left, node.args[1]), g.constant(0.5))
    right = g.add("multiply", node.args[1], g.constant(2.0))
    return g.add("multiply", g.constant(0.5), g.add(node.op, left, right))


@rule("add", "multiply", "subtract", "gemm", "per_row", "per_column")
def _trivial(g: Graph, node: Node, random: Random) -> int:
    value = g.nodes.index(node)
    if random.random() < 0.5:
        return g.add("multiply", g.constant(1.0), value)
    return g.add("add", value, g.constant(0.0))


RULES: dict[str, Rule] = {
    "commuted": _commuted,
    "re-associated": _associated,
    "factored": _factored,
    "distributed": _distributed,
    "difference as a sum": _difference,
    "sum as a difference": _sum,
    "quotient as a product": _quotient,
    "product as a quotient": _product,
    "sign taken out": _sign,
    "doubled and halved": _halved,
    "times one, plus zero": _trivial,
}
