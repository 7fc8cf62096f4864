"""Rewrite activations, roots and choices."""

from __future__ import annotations

import math
from random import Random

from benchmarks.campaign.graph import Graph, Skip
from benchmarks.campaign.rewrites.rules import Rule, known, rule
from coda_agent.primitives.lang.ir import Node

ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


@rule("silu")
def _silu(g: Graph, node: Node, random: Random) -> int:
    (a,) = node.args
    match random.randrange(3):
        case 0:
            return g.add("multiply", a, g.add("sigmoid", a))
        case 1:
            return g.add("divide", a, _one_and_exp(g, a))
    half = g.add("multiply", a, g.constant(0.5))
    return g.add("multiply", half, g.add("add", g.constant(1.0), g.add("tanh", half)))


def _one_and_exp(g: Graph, a: int) -> int:
    """The node 1 + exp(-a)."""
    return g.add("add", g.constant(1.0), g.add("exp", g.add("negative", a)))


@rule("sigmoid")
def _sigmoid(g: Graph, node: Node, random: Random) -> int:
    (a,) = node.args
    if random.random() < 0.7:
        return g.add("divide", g.constant(1.0), _one_and_exp(g, a))
    return g.add("exp", g.add("negative", g.add("softplus", g.add("negative", a))))


@rule("gelu")
def _gelu(g: Graph, node: Node, random: Random) -> int:
    (a,) = node.args
    cube = g.add("multiply", g.add("multiply", a, a), g.add("multiply", a, g.constant(0.044715)))
    inner = g.add("multiply", g.constant(ROOT_2_OVER_PI), g.add("add", a, cube))
    if random.random() < 0.5:
        twice = g.add("multiply", g.constant(2.0), inner)
        return g.add("multiply", a, g.add("sigmoid", twice))
    one = g.add("add", g.constant(1.0), g.add("tanh", inner))
    return g.add("multiply", g.add("multiply", g.constant(0.5), a), one)


@rule("rsqrt")
def _rsqrt(g: Graph, node: Node, random: Random) -> int:
    (a,) = node.args
    match random.randrange(3):
        case 0:
            return g.add("divide", g.constant(1.0), g.add("sqrt", a))
        case 1:
            return g.add("sqrt", g.add("divide", g.constant(1.0), a))
    return g.add("exp", g.add("multiply", g.constant(-0.5), g.add("log", a)))


@rule("sin", "cos", "tanh")
def _parity(g: Graph, node: Node, random: Random) -> int:
    made = g.add(node.op, g.add("negative", node.args[0]))
    return made if node.op == "cos" else g.add("negative", made)


@rule("exp")
def _exp(g: Graph, node: Node, random: Random) -> int:
    (a,) = node.args
    return g.add("divide", g.constant(1.0), g.add("exp", g.add("negative", a)))


@rule("maximum")
def _relu(g: Graph, node: Node, random: Random) -> int:
    a, zero = node.args
    if g.nodes[zero] != Node("constant", (), 0.0):
        raise Skip("another bound")
    match random.randrange(5):
        case 0:
            return g.add("where", g.add("greater", a, zero), a, zero)
        case 1:
            return g.add("where", g.add("less_equal", a, zero), zero, a)
        case 2:
            return g.add("multiply", g.constant(0.5), g.add("add", a, g.add("abs", a)))
        case 3:
            return g.add("multiply", a, g.add("greater", a, zero))
    return g.add("negative", g.add("minimum", g.add("negative", a), zero))


@rule("abs")
def _abs(g: Graph, node: Node, random: Random) -> int:
    (a,) = node.args
    minus, zero = g.add("negative", a), g.constant(0.0)
    match random.randrange(3):
        case 0:
            return g.add("maximum", a, minus)
        case 1:
            return g.add("where", g.add("less", a, zero), minus, a)
    return g.add("negative", g.add("minimum", a, minus))


@rule("where")
def _where(g: Graph, node: Node, random: Random) -> int:
    condition, a, b = node.args
    turned = {"equal": "not_equal", "not_equal": "equal", "less": "greater_equal", "greater": "less_equal"}
    turned |= {"less_equal": "greater", "greater_equal": "less"}
    compared = g.nodes[condition]
    if compared.op in turned and random.random() < 0.5:
        return g.add("where", g.add(turned[compared.op], *compared.args), b, a)
    return g.add("where", g.add("subtract", g.constant(1.0), condition), b, a)


@rule("less", "greater", "less_equal", "greater_equal", "equal", "not_equal")
def _compared(g: Graph, node: Node, random: Random) -> int:
    turned = {"less": "greater", "greater": "less", "less_equal": "greater_equal"}
    turned |= {"greater_equal": "less_equal"}
    a, b = node.args
    if random.random() < 0.5:
        return g.add(turned.get(node.op, node.op), b, a)
    return g.add(node.op, g.add("subtract", a, b), g.constant(0.0))


@rule("where")
def _onehot(g: Graph, node: Node, random: Random) -> int:
    """Rewrite where(c, a - k, a) as a - k * c, and where(c, a, 0) as c * a."""
    condition, a, b = node.args
    known(g, condition, "equal", "not_equal", "less", "greater", "less_equal", "greater_equal")
    if g.nodes[b] == Node("constant", (), 0.0):
        return g.add("multiply", condition, a)
    less = known(g, a, "subtract")
    if less.args[0] != b:
        raise Skip("its values do not fit")
    return g.add("subtract", b, g.add("multiply", condition, less.args[1]))


@rule("row_select")
def _select(g: Graph, node: Node, random: Random) -> int:
    tile, index = node.args
    place, target = g.add("column_index", tile), g.add("per_row", index)
    zero = g.constant(0.0)
    match random.randrange(3):
        case 0:
            kept = g.add("where", g.add("equal", place, target), tile, zero)
        case 1:
            kept = g.add("where", g.add("not_equal", target, place), zero, tile)
        case _:
            gap = g.add("subtract", place, target)
            kept = g.add("where", g.add("equal", gap, zero), tile, zero)
    return g.add("row_sums", kept)


RULES: dict[str, Rule] = {
    "silu written out": _silu,
    "sigmoid written out": _sigmoid,
    "gelu written out": _gelu,
    "root written out": _rsqrt,
    "odd and even functions": _parity,
    "exponential of the negative": _exp,
    "relu written out": _relu,
    "magnitude written out": _abs,
    "choice turned round": _where,
    "comparison turned round": _compared,
    "one-hot as arithmetic": _onehot,
    "selection by comparison": _select,
}
