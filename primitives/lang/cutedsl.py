"""The types of CuTeDSL texts for primitives that need more than an expression over registers. Each
primitive's file declares its texts, and ``gemm_codegen`` and ``vector_codegen`` use them.

Texts are templates. A ``resource`` is the constructor call of an epilogue's helper object, with ``{name}``
for the object's name; its class is QuACK's or from ``primitives.device``. This module needs only the standard
library, because the jail imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Reduction(NamedTuple):
    """Reduce a tile to a vector along ``axis``: "row" gives one value per row, [M], and "column" gives one
    value per column, [N].

    ``fold``: maps the texts of the running value and of new values to the next running value's text, lane by
    lane. It is None if the resource takes a whole subtile's fragment. ``spoils``: whether the resource
    overwrites that fragment. ``identity``: the value of a lane past a ragged edge. ``finish``: the text that
    computes a value from its partials, of which there is one per CTA tile. ``finish`` uses ``{partial}``, or
    ``{partials}`` with a comma after each, and ``{half}``, whether the tile is half as wide as its GEMM.
    ``said``: a description of ``finish`` for people, with ``{kept}`` for the partials.

    A reduction that ``selects`` takes one index per row as its second argument and returns one value per row.
    Its texts also use ``{index}`` and ``{extent}``, the number of the tile's columns. ``own_width``: for a
    reduction that takes only tiles as wide as their GEMM, what to suggest for a tile half as wide, and for a
    tile twice as wide.
    """

    axis: Literal["row", "column"]
    resource: str
    finish: str
    said: str
    fold: Callable[[str, Sequence[str]], str] | None = None
    identity: float = 0.0
    spoils: bool = False
    selects: bool = False
    own_width: tuple[str, str] | None = None


class Statistic(NamedTuple):
    """A primitive that computes one value per head in a sweep over the accumulator before the epilogue. The
    kernel's argument for the resource is the width of heads. ``own_width``: as in Reduction."""

    resource: str
    own_width: tuple[str, str]


class Spread(NamedTuple):
    """A primitive that spreads a vector over a tile. ``role``: the role of the vector's kernel argument.
    ``lanes``: the texts of its values in a pair of lanes, with ``{name}`` for the resource."""

    role: Literal["row", "column"]
    resource: str
    lanes: tuple[str, ...]
