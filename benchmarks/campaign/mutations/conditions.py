"""Mutations that make a value wrong where a condition holds. The condition tests values or columns, by a
comparison or by a smooth function."""

from __future__ import annotations

from benchmarks.campaign.mutations.site import COMPARISONS, Edit, Site


def on_value(site: Site) -> str:
    """Make a value wrong where some value is above or below a threshold."""
    target = site.value("tile", "vector", "head")
    condition, words = site.condition(target)
    return _choose(site, target, condition, words)


def on_two_values(site: Site) -> str:
    """Make a value wrong where two conditions hold together."""
    target = site.value("tile", "vector", "head")
    (first, one), (second, other) = site.condition(target), site.condition(target)
    if site.random.random() < 0.5:
        both = site.add("multiply", first, second)
    else:
        both = site.add("minimum", first, second)
    return _choose(site, target, both, f"{one} and {other}")


def on_nested(site: Site) -> str:
    """Make a value wrong where one condition holds within the branch of another condition."""
    target = site.value("tile", "vector", "head")
    (outer, one), (inner, other) = site.condition(target), site.condition(target)
    within = site.add("where", inner, site.wrong(target), target)
    site.put(target, site.add("where", outer, within, target))
    return f"{site.name(target)} wrong where {one}, within it {other}"


def on_pair(site: Site) -> str:
    """Make a value wrong where one value is far larger than another value."""
    target = site.value("tile", "vector", "head")
    one, other = site.meets(target), site.meets(target)
    factor = 10 ** site.random.uniform(-1, 6)
    how = site.random.choice(COMPARISONS[:2])
    limit = site.add("multiply", other, factor)
    node = site.known(one)
    site.aims.append((node, 3 * factor * site.scales[site.known(other)]))
    words = f"{site.name(one)} {how} {factor:.4g} * {site.name(other)}"
    return _choose(site, target, site.add(how, one, limit), words)


def on_equality(site: Site) -> str:
    """Make a value wrong where some value equals a number exactly."""
    target = site.value("tile", "vector", "head")
    value = site.meets(target)
    number = float(site.random.choice((0, 1, -1, 2, 7, 8191, 8192, 0.5)))
    site.aims.append((site.known(value), number))
    return _choose(site, target, site.add("equal", value, number), f"{site.name(value)} == {number}")


def smooth_switch(site: Site) -> str:
    """Blend a value from right to wrong, with a sigmoid that is centred at a threshold."""
    target = site.value("tile", "vector", "head")
    value = site.meets(target)
    limit = site.threshold(site.known(value))
    steep = 10 ** site.random.uniform(0.7, 2.5) / max(abs(limit), 1e-6)
    gap = site.add("subtract", value, limit)
    share = site.add("sigmoid", site.add("multiply", gap, steep if limit > 0 else -steep))
    _blend(site, target, share)
    return f"{site.name(target)} goes wrong by a sigmoid of {site.name(value)} past {limit:.4g}"


def bump(site: Site) -> str:
    """Blend a value from right to wrong where another value v is near c. The wrong value has the weight eps /
    ((v - c)**2 + eps)."""
    target = site.value("tile", "vector", "head")
    value = site.meets(target)
    limit = site.threshold(site.known(value))
    width = (abs(limit) * 10 ** site.random.uniform(-2, -0.3)) ** 2
    gap = site.add("subtract", value, limit)
    _blend(site, target, site.bump(gap, max(width, 1e-30)))
    return f"{site.name(target)} wrong around {site.name(value)} = {limit:.4g}, width {width**0.5:.3g}"


def on_column(site: Site) -> str:
    """Set one column to zero, or that column and all columns before or after it."""
    target = site.value("tile")
    place = site.add("column_index", target)
    extent = site.graph.types[target].shape[1](site.case())
    at = float(int(extent ** site.random.random()) - 1)
    how = site.random.choice(("equal", "equal", "greater_equal", "less_equal"))
    return _choose(site, target, site.add(how, place, at), f"column {how} {at:.0f}", lost=True)


def on_column_share(site: Site) -> str:
    """Set the last few columns to zero. The condition compares column indices with the tile's width."""
    target = site.value("tile")
    width = site.graph.dim(site.graph.types[target].shape[1])
    count = float(site.random.choice((1, 1, 2, 7, 64)))
    place = site.add("column_index", target)
    last = site.add("greater_equal", site.add("add", place, count), width)
    return _choose(site, target, last, f"the last {count:.0f} columns", lost=True)


def _choose(site: Site, target: int, condition: int, words: str, lost: bool = False) -> str:
    """Make a value wrong where the condition holds. The change is written in one of three ways, chosen at
    random. ``lost``: the wrong value is zero."""
    wrong = site.add("multiply", target, 0.0) if lost else site.wrong(target)
    match site.random.randrange(3):
        case 0:
            site.put(target, site.add("where", condition, wrong, target))
        case 1:
            site.put(target, site.add("where", _inverse(site, condition), target, wrong))
        case 2:
            site.put(target, site.add("multiply", target, _inverse(site, condition)))
    return f"{site.name(target)} wrong where {words}"


def _inverse(site: Site, condition: int) -> int:
    return site.add("subtract", 1.0, condition)


def _blend(site: Site, target: int, share: int) -> None:
    """Scale a value by one minus a multiple of ``share``."""
    part = site.add("multiply", share, site.random.choice((1.0, -0.1, 0.5)))
    site.put(target, site.add("subtract", target, site.add("multiply", part, target)))


KINDS: dict[str, Edit] = {
    "on a value": on_value,
    "on two values": on_two_values,
    "on nested values": on_nested,
    "on a pair": on_pair,
    "on an equality": on_equality,
    "smooth switch": smooth_switch,
    "bump": bump,
    "on a column": on_column,
    "on last columns": on_column_share,
}
