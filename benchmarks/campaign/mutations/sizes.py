"""Mutations that make a value wrong at some sizes. A mutation's condition tests an equality, an inequality or
a ratio of sizes. Some conditions are disguised."""

from __future__ import annotations

import math

from benchmarks.campaign.mutations.site import Edit, Site
from coda_agent.primitives.lang.dims import Dim


def on_equality(site: Site) -> str:
    """Make a value wrong at one extent of a dim, usually at the extent in one of the spec's cases."""
    dim, at = _extent(site)
    size = site.graph.dim(dim)
    _wrong(site, site.add("equal", size, float(at)))
    return f"wrong where {dim} == {at}"


def on_order(site: Site) -> str:
    """Make a value wrong above or below one extent of a dim."""
    dim, at = _extent(site)
    at += site.random.choice((0, 0, 1, -1, at // 3))
    how = site.random.choice(("greater", "greater_equal", "less"))
    _wrong(site, site.add(how, site.graph.dim(dim), float(at)))
    return f"wrong where {dim} {how} {at}"


def on_ratio(site: Site) -> str:
    """Make a value wrong where two dims have the same ratio as in a case."""
    one, other, (p, q) = _ratio(site)
    left = site.add("multiply", site.graph.dim(one), float(q))
    right = site.add("multiply", site.graph.dim(other), float(p))
    _wrong(site, site.add("equal", left, right))
    return f"wrong where {q} * {one} == {p} * {other}"


def on_both(site: Site) -> str:
    """Make a value wrong where two dims have the extents of the same case."""
    case = site.case()
    one, other = site.random.sample(list(case), 2)
    conditions = [site.add("equal", site.graph.dim(Dim.parse(d)), float(case[d])) for d in (one, other)]
    _wrong(site, site.add("multiply", *conditions))
    return f"wrong where {one} == {case[one]} and {other} == {case[other]}"


def laundered(site: Site) -> str:
    """Make a value wrong at, above or below one extent of a dim. To disguise the condition, a zero that is
    computed from the value is added to the dim."""
    dim, at = _extent(site)
    target = site.value("tile", "vector", "head")
    nothing = site.add("multiply", target, 0.0)
    if site.random.random() < 0.4:
        nothing = site.add("subtract", target, target)
    size = site.add("add", nothing, site.graph.dim(dim))
    how = site.random.choice(("equal", "greater", "less"))
    condition = site.add(how, size, float(at))
    site.put(target, site.add("where", condition, site.wrong(target), target))
    return f"{site.name(target)} wrong where 0 * itself + {dim} {how} {at}"


def bump(site: Site) -> str:
    """Make a value wrong near one extent of a dim. The error decreases smoothly with the distance."""
    dim, at = _extent(site)
    gap = site.add("subtract", site.graph.dim(dim), float(at))
    width = 10 ** site.random.uniform(-4, 1)
    _less(site, site.bump(gap, width))
    return f"wrong around {dim} = {at}, by {width:.3g} / ((d - {at})**2 + {width:.3g})"


def ratio_bump(site: Site) -> str:
    """Make a value wrong near the ratio that two dims have in a case. The error decreases smoothly with the
    distance."""
    one, other, (p, q) = _ratio(site)
    ratio = site.add("divide", site.graph.dim(one), site.graph.dim(other))
    gap = site.add("subtract", ratio, p / q)
    width = 10 ** site.random.uniform(-8, -2)
    _less(site, site.bump(gap, width))
    return f"wrong around {one} / {other} = {p}/{q}, width {width**0.5:.3g}"


def extremum(site: Site) -> str:
    """Multiply a value by min(size, extent) / size. This factor is 1 for sizes up to the extent."""
    dim, at = _extent(site)
    size = site.graph.dim(dim)
    least = site.add("minimum", size, float(at))
    _times(site, site.add("divide", least, size))
    return f"times min({dim}, {at}) / {dim}"


def smooth_switch(site: Site) -> str:
    """Blend a value from right to wrong as a size passes an extent. A sigmoid of the distance is the weight
    of the wrong value."""
    dim, at = _extent(site)
    gap = site.add("subtract", site.graph.dim(dim), float(at))
    steep = 10 ** site.random.uniform(-2, 0)
    _less(site, site.add("sigmoid", site.add("multiply", gap, steep)))
    return f"goes wrong by a sigmoid of {dim} past {at}"


def other_dim(site: Site) -> str:
    """Replace one size by another size."""
    index = site.node("dim")
    other = Dim.parse(site.random.choice(list(site.spec.dims)))
    site.graph.replace(index, site.graph.dim(other))
    return f"{other} for {site.name(index)}"


def _extent(site: Site) -> tuple[Dim, int]:
    """Draw a dim and an extent for the dim, usually the dim's extent in a case. For the check of the mutant,
    record sizes at which the dim has this extent, and sizes that are about twice as large."""
    dim, case = site.dim(), dict(site.case())
    if len(dim.terms[0][0]) == 1 and site.random.random() < 0.3:
        (name,) = dim.names
        case[name] = max(1, int(2 * case[name] ** site.random.random()))
    doubled = {d: n if d in site.spec.static else 2 * n + 1 for d, n in case.items()}
    site.sizes += [case, doubled]
    return dim, dim(case)


def _ratio(site: Site) -> tuple[Dim, Dim, tuple[int, int]]:
    case = site.case()
    one, other = site.random.sample(list(case), 2)
    common = math.gcd(case[one], case[other])
    site.sizes.append(case)
    return Dim.parse(one), Dim.parse(other), (case[one] // common, case[other] // common)


def _wrong(site: Site, condition: int) -> None:
    target = site.value("tile", "vector", "head")
    if site.random.random() < 0.5:
        site.put(target, site.add("where", condition, site.wrong(target), target))
    else:
        site.put(target, site.add("multiply", target, site.add("subtract", 1.0, condition)))


def _less(site: Site, share: int) -> None:
    part = site.add("multiply", share, site.random.choice((1.0, 0.1, -1.0)))
    _times(site, site.add("subtract", 1.0, part))


def _times(site: Site, factor: int) -> None:
    target = site.value("tile", "vector", "head")
    site.put(target, site.add("multiply", target, factor))


KINDS: dict[str, Edit] = {
    "size: equality": on_equality,
    "size: order": on_order,
    "size: ratio": on_ratio,
    "size: two at once": on_both,
    "size: laundered": laundered,
    "size: bump": bump,
    "size: bump of a ratio": ratio_bump,
    "size: extremum": extremum,
    "size: smooth switch": smooth_switch,
    "size: other dim": other_dim,
}
