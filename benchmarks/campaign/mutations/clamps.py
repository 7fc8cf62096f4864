"""Mutations that bound a value with a minimum or maximum, or with equivalent arithmetic."""

from __future__ import annotations

from benchmarks.campaign.graph import Skip
from benchmarks.campaign.mutations.site import Edit, Site


def clamp(site: Site) -> str:
    """Bound a value by a number, with a minimum or maximum."""
    value, how = site.value(), site.random.choice(("minimum", "maximum"))
    limit = site.threshold(value)
    # Usually choose the side that leaves small values unchanged.
    if site.random.random() < 0.8:
        how = "minimum" if limit > 0 else "maximum"
    site.put(value, site.add(how, value, limit))
    return f"{how}({site.name(value)}, {limit:.6g})"


def clamp_band(site: Site) -> str:
    """Bound the magnitude of a value, with a minimum and a maximum."""
    value = site.value()
    limit = abs(site.threshold(value))
    site.put(value, site.add("maximum", site.add("minimum", value, limit), -limit))
    return f"{site.name(value)} within +-{limit:.6g}"


def clamp_by_value(site: Site) -> str:
    """Limit a value to at most a multiple of another value."""
    value = site.value("tile", "vector")
    if (other := site.meets(value)) == value:
        raise Skip("a value is no larger than itself")
    factor = 10 ** site.random.uniform(-1, 6)
    limit = site.add("multiply", site.add("abs", other), factor)
    site.put(value, site.add("minimum", value, limit))
    site.aims.append((value, 3 * factor * site.scales[site.known(other)]))
    return f"minimum({site.name(value)}, {factor:.4g} * abs({site.name(other)}))"


def clamp_smooth(site: Site) -> str:
    """Apply a saturating function that is close to the identity for small values."""
    value = site.value()
    limit = abs(site.threshold(value))
    site.put(value, site.add("multiply", site.add("tanh", site.add("divide", value, limit)), limit))
    return f"{limit:.6g} * tanh({site.name(value)} / {limit:.6g})"


def clamp_by_root(site: Site) -> str:
    """Bound a value v by a number c without a comparison, through the root of a square. For example, the
    minimum is (v + c - sqrt((v - c)**2)) / 2."""
    value = site.value()
    limit = site.threshold(value)
    gap = site.add("subtract", value, limit)
    root = site.add("sqrt", site.add("multiply", gap, gap))
    both = site.add("add", value, limit)
    op = "subtract" if limit > 0 else "add"
    site.put(value, site.add("multiply", site.add(op, both, root), 0.5))
    return f"{site.name(value)} bounded by {limit:.6g} through a root of a square"


def clamp_by_where(site: Site) -> str:
    """Bound a value by a number, with a comparison that chooses between the value and the number."""
    value = site.value()
    limit = site.threshold(value)
    how = "greater" if limit > 0 else "less"
    site.put(value, site.add("where", site.add(how, value, limit), limit, value))
    return f"where({site.name(value)} {how} {limit:.6g}, {limit:.6g}, itself)"


KINDS: dict[str, Edit] = {
    "clamp": clamp,
    "clamp: band": clamp_band,
    "clamp: by a value": clamp_by_value,
    "clamp: smooth": clamp_smooth,
    "clamp: by a root": clamp_by_root,
    "clamp: by where": clamp_by_where,
}
