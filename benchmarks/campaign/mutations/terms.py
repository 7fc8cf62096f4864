"""Mutations that drop, swap or scale a term, or change its sign, spread or function."""

from __future__ import annotations

from benchmarks.campaign.graph import Skip, same_type
from benchmarks.campaign.mutations.site import Edit, Site
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Node

RANGES = ("column_range", "in_columns")
UNARY = ("exp", "log", "sqrt", "rsqrt", "tanh", "sin", "cos", "sigmoid", "silu", "gelu", "abs", "negative")
OTHERS = {
    "silu": ("gelu", "sigmoid", "tanh"),
    "gelu": ("silu",),
    "sigmoid": ("tanh", "silu"),
    "tanh": ("sigmoid", "silu", "sin"),
    "sin": ("cos", "tanh"),
    "cos": ("sin",),
    "exp": ("softplus",),
    "rsqrt": ("sqrt",),
    "maximum": ("minimum", "add"),
    "minimum": ("maximum",),
    "equal": ("greater_equal", "less_equal", "not_equal"),
    "not_equal": ("equal", "less"),
    "less": ("less_equal",),
    "greater": ("greater_equal",),
    "add": ("subtract", "maximum"),
    "subtract": ("add",),
    "multiply": ("divide", "add"),
    "divide": ("multiply",),
    "even": ("odd",),
    "odd": ("even",),
    "row_sums": ("row_max", "row_abs_max", "row_logsumexp"),
    "row_abs_max": ("row_max", "row_sums"),
    "row_logsumexp": ("row_max", "row_sums"),
    "head_sums": ("head_abs_max",),
    "head_abs_max": ("head_sums",),
    "column_sums": ("column_max", "column_abs_max"),
    "per_row": ("per_column",),
    "per_column": ("per_row",),
}


def dropped_term(site: Site) -> str:
    """Replace a sum, difference, product, quotient, minimum or maximum by one of its operands."""
    index = site.node("add", "subtract", "multiply", "divide", "maximum", "minimum")
    kept = site.random.choice(site.graph.nodes[index].args)
    site.put(index, kept)
    return f"{site.name(index)} is its {site.name(kept)} alone"


def dropped_function(site: Site) -> str:
    """Replace a function by its argument, or a ``where`` by its last value."""
    index = site.node(*UNARY, "where", "per_head")
    kept = site.graph.nodes[index].args[-1]
    site.put(index, kept)
    return f"{site.name(index)} is left out"


def swapped(site: Site) -> str:
    """Swap the operands of an operation that does not commute."""
    index = site.node("subtract", "divide", "where", "join", "less", "greater", "gemm", "row_select")
    node = site.graph.nodes[index]
    site.graph.become(index, node._replace(args=(*node.args[:-2], node.args[-1], node.args[-2])))
    return f"operands of {site.name(index)} swapped"


def neighbour(site: Site) -> str:
    """Replace an argument by another value of the same type."""
    readers = [i for i, n in enumerate(site.graph.program.nodes) if n.args]
    reader = site.choice(readers)
    argument = site.random.randrange(len(site.graph.nodes[reader].args))
    before = site.graph.nodes[reader].args[argument]
    other = site.choice(same_type(site.graph, before, site.graph.free_of(reader)))
    site.graph.rewire(reader, argument, other)
    return f"{site.name(reader)} reads {site.name(other)} for {site.name(before)}"


def other_input(site: Site) -> str:
    """Replace an input everywhere by another input of the same type."""
    index = site.node("input")
    others = [i for i in same_type(site.graph, index, site.graph.originals(site.graph.types[index].kind))]
    other = site.choice([i for i in others if site.graph.nodes[i].op == "input"])
    site.graph.replace(index, other)
    return f"{site.name(other)} for {site.name(index)}"


def other_function(site: Site) -> str:
    """Replace an operation by a similar one."""
    index = site.node(*OTHERS)
    node = site.graph.nodes[index]
    other = site.random.choice(OTHERS[node.op])
    site.graph.become(index, node._replace(op=other))
    return f"{node.op}#{index} as {other}"


def other_spread(site: Site) -> str:
    """Spread a vector along the other axis, or spread another vector of the same length."""
    index = site.node("per_row", "per_column", "per_head")
    node = site.graph.nodes[index]
    vector = node.args[0]
    alike = same_type(site.graph, vector, site.graph.free_of(index))
    if alike and site.random.random() < 0.5:
        other = site.choice(alike)
        site.graph.rewire(index, 0, other)
        return f"{node.op} of {site.name(other)}, not of {site.name(vector)}"
    if node.op == "per_head":
        raise Skip("it spreads one way only")
    other_way = "per_column" if node.op == "per_row" else "per_row"
    site.graph.become(index, node._replace(op=other_way))
    return f"{other_way} of {site.name(vector)}, not {node.op}"


def other_range(site: Site) -> str:
    """Move a range of columns, or only the end of the range. The distance in columns is two, or equals the
    start or the width of one of the program's ranges."""
    index = site.node(*RANGES)
    ranges = [str(n.attribute).split(", ") for n in site.graph.program.nodes if n.op in RANGES]
    first, width = map(Dim.parse, str(site.graph.nodes[index].attribute).split(", "))
    step = Dim.parse(site.random.choice([text for pair in ranges for text in pair] + ["2"]))
    step = site.random.choice((step, -step))
    moved = (first + step, width) if site.random.random() < 0.5 else (first, width + step)
    attribute = ", ".join(map(str, moved))
    site.graph.become(index, site.graph.nodes[index]._replace(attribute=attribute))
    return f"{site.name(index)} at {attribute}"


def constant_off(site: Site) -> str:
    """Change a constant or a size: scale or negate the number, make it zero, or add 1."""
    index = site.node("constant", "dim")
    factors = (0.0, -1.0, 10.0, 0.1, 1.01, 0.99, 10 ** site.random.uniform(-1, 1))
    factor = site.random.choice(factors)
    shift = site.random.random() < 0.15
    new = site.add("add", index, 1.0) if shift else site.add("multiply", index, factor)
    site.graph.replace(index, new)
    return f"{site.name(index)} {'plus 1' if shift else f'times {factor:.4g}'}"


def eps_off(site: Site) -> str:
    """Drop a small constant, or scale it."""
    nodes = enumerate(site.graph.program.nodes)
    index = site.choice([i for i, n in nodes if n.op == "constant" and _small(n)])
    factor = site.random.choice((0.0, 10.0, 100.0, 0.1, 0.01, -1.0, 3.0))
    value = float(site.graph.nodes[index].attribute or 0.0) * factor
    site.graph.replace(index, site.graph.constant(value))
    return f"{site.name(index)} as {value:.4g}"


def _small(node: Node) -> bool:
    return isinstance(node.attribute, float) and 0 < abs(node.attribute) < 1e-3


def factor_off(site: Site) -> str:
    """Change a value by 1 % to 50 %: multiply the value by a factor, or add a fraction of the value's largest
    magnitude."""
    value = site.value()
    share = 10 ** site.random.uniform(-2, -0.3) * site.random.choice((-1, 1))
    if site.random.random() < 0.3:
        new = site.add("add", value, share * site.scales[value])
    else:
        new = site.add("multiply", value, 1 + share)
    site.put(value, new)
    return f"{site.name(value)} off by {share:.3g}"


def sign_slip(site: Site) -> str:
    """Negate a value."""
    value = site.value()
    site.put(value, site.add("negative", value))
    return f"-{site.name(value)}"


def abs_put_in(site: Site) -> str:
    """Replace a value by its magnitude, in one of several forms."""
    value = site.value()
    match site.random.randrange(5):
        case 0:
            made, words = site.add("maximum", value, site.add("negative", value)), "max(v, -v)"
        case 1:
            made, words = site.add("sqrt", site.add("multiply", value, value)), "sqrt(v * v)"
        case 2:
            flipped = site.add("negative", value)
            made, words = site.add("where", site.add("less", value, 0.0), flipped, value), "where"
        case _:
            made, words = site.add("abs", value), "abs"
    site.aims.append((value, -site.scales[value]))
    site.put(value, made)
    return f"{words} of {site.name(value)}"


def abs_of_difference(site: Site) -> str:
    """Replace a difference or sum d by sqrt(d**2)."""
    value = site.node("subtract", "add")
    site.aims.append((value, -site.scales[value]))
    site.put(value, site.add("sqrt", site.add("multiply", value, value)))
    return f"{site.name(value)} through the root of its square"


def abs_left_out(site: Site) -> str:
    """Replace a magnitude by its argument."""
    index = site.node("abs", "row_abs_max", "column_abs_max")
    node = site.graph.nodes[index]
    if node.op == "abs":
        site.graph.replace(index, node.args[0])
    else:
        site.graph.become(index, node._replace(op=node.op.replace("abs_", "")))
    return f"no magnitude in {site.name(index)}"


def twice(site: Site) -> str:
    """Use a term or factor twice."""
    index = site.node("add", "multiply", "subtract", "divide")
    node = site.graph.nodes[index]
    again = site.random.choice([a for a in node.args if site.graph.types[a].kind != "operand"])
    site.put(index, site.add(node.op, index, again))
    return f"{site.name(again)} twice in {site.name(index)}"


KINDS: dict[str, Edit] = {
    "dropped term": dropped_term,
    "dropped function": dropped_function,
    "swapped operands": swapped,
    "neighbour": neighbour,
    "other input": other_input,
    "other function": other_function,
    "other spread": other_spread,
    "other range": other_range,
    "constant": constant_off,
    "eps": eps_off,
    "factor": factor_off,
    "taken twice": twice,
    "sign": sign_slip,
    "abs put in": abs_put_in,
    "abs of a difference": abs_of_difference,
    "abs left out": abs_left_out,
}
