"""Mutations that draws at the cases' own sizes hardly ever meet: static sizes as literals, bumps near one
value of an input, factors of two sizes, and factors that 16 bits hide."""

from __future__ import annotations

from benchmarks.campaign.graph import Skip
from benchmarks.campaign.mutations.site import Edit, Site
from coda_agent.primitives.lang.dims import Dim

ROUND = (1.0, 0.5, 2.0, 0.1, 10.0, 1e-5, 1e-6, 0.7071, 4096.0, 7777.0, 131072.0)


def literal(site: Site) -> str:
    """Replace a size that contains static dims by its value in one case."""
    index, size = _static(site)
    value = size(site.case())
    site.graph.replace(index, site.graph.constant(float(value)))
    return f"{value} for {size}"


def other_ratio(site: Site) -> str:
    """Replace a size that contains static dims by a multiple of another dim, right in one case."""
    index, size = _static(site)
    case = site.case()
    others = [d for d in site.spec.static if d not in size.names]
    if not others:
        raise Skip("it has no other static dim")
    other = site.random.choice(others)
    factor = size(case) / case[other]
    replaced = site.add("multiply", site.graph.dim(Dim.parse(other)), float(factor))
    site.graph.replace(index, replaced)
    return f"{factor:g} * {other} for {size}"


def line(site: Site) -> str:
    """Replace a size that contains static dims by a parabola of a static dim, right in two cases."""
    index, size = _static(site)
    (name, *_) = sorted(size.names)
    dim, values = site.graph.dim(Dim.parse(name)), sorted({case.sizes[name] for case in site.spec.cases})
    one, other = float(values[0]), float(values[-1])
    off = site.add("multiply", site.add("subtract", dim, one), site.add("subtract", dim, other))
    part = site.add("multiply", off, site.random.choice((0.05, -0.01, 1.0)) / (one * other))
    site.graph.replace(index, site.add("multiply", site.graph.dim(size), site.add("add", 1.0, part)))
    return f"{size} times a parabola of {name}, 1 at {one:g} and {other:g}"


def near_a_value(site: Site) -> str:
    """Multiply a value by a factor that is 1 except near one value of an input."""
    known = [i for i in site.graph.originals("scalar", "vector") if site.graph.nodes[i].op == "input"]
    index = site.choice(known)
    tensor = site.spec.inputs[str(site.graph.nodes[index].attribute)]
    case = site.case()
    low, high = tensor.bounds(case)
    start, end = tensor.init.span_at(case)
    number = site.random.choice([*(n for n in ROUND if low <= n <= high), start, end, (start + 2 * end) / 3])
    number = float(round(number)) if tensor.dtype.startswith("int") else float(number)
    width = (abs(number) or 1.0) * 10 ** site.random.uniform(-6, -3)
    width = 0.01 if tensor.dtype.startswith("int") else width
    gap = site.add("subtract", index, number)
    kind = site.graph.types[index].kind
    target = site.value("vector", "head", "tile") if kind == "scalar" else _beside(site, index)
    share = site.bump(gap, width * width)
    factor = site.add("subtract", 1.0, site.add("multiply", share, site.random.choice((1.0, 0.5, -1.0))))
    site.aims.append((index, number))
    site.put(target, site.add("multiply", target, factor))
    return f"{site.name(target)} wrong near {site.name(index)} = {number:g}, width {width:.2g}"


def two_sizes(site: Site) -> str:
    """Multiply a value by 1 plus a power of the product of two sizes, which is small unless both are long."""
    case = max((c.sizes for c in site.spec.cases), key=lambda sizes: sum(sizes.values()))
    free = [d for d in site.spec.dims if d not in site.spec.static]
    if len(free) < 2:
        raise Skip("it has fewer than two dims that are not static")
    one, other = site.random.sample(free, 2)
    scale = case[one] * case[other] / site.random.choice((1.0, 2.0, 4.0))
    size = site.add("multiply", site.graph.dim(Dim.parse(one)), site.graph.dim(Dim.parse(other)))
    power = site.add("divide", size, float(scale))
    power = site.add("multiply", power, power)
    power = site.add("multiply", power, power)
    target = site.value("tile", "vector", "head")
    site.put(target, site.add("multiply", target, site.add("add", 1.0, power)))
    return f"{site.name(target)} times 1 + ({one} * {other} / {scale:.3g})**4"


def hidden_factor(site: Site) -> str:
    """Multiply a value by a factor that is nearly 1, so that 16 bits may hide it."""
    factor = 1 + site.random.choice((1, -1)) * 10 ** site.random.uniform(-3.6, -2.5)
    target = site.value("tile", "vector", "head")
    site.put(target, site.add("multiply", target, factor))
    return f"{site.name(target)} times {factor:.6f}"


def _static(site: Site) -> tuple[int, Dim]:
    nodes = enumerate(site.graph.program.nodes)
    sized = [(i, Dim.parse(str(n.attribute))) for i, n in nodes if n.op == "dim"]
    index = site.choice([i for i, size in sized if size.names & {*site.spec.static}])
    return index, dict(sized)[index]


def _beside(site: Site, index: int) -> int:
    """A vector of the same shape as the node ``index``, or that node itself."""
    same = [i for i in site.graph.originals("vector") if site.graph.types[i] == site.graph.types[index]]
    return site.choice(same)


KINDS: dict[str, Edit] = {
    "static: literal": literal,
    "static: other ratio": other_ratio,
    "static: parabola": line,
    "bump near a value": near_a_value,
    "two sizes at once, smooth": two_sizes,
    "hidden factor": hidden_factor,
}
