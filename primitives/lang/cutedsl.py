"""Types for the CuTeDSL code of primitives that need more than an expression over registers.

Each primitive's file declares its code templates, which ``gemm_codegen`` and ``vector_codegen`` use. In a
template, ``resource`` is the constructor call of an epilogue's helper object, with ``{name}`` for the
object's name. The object's class is QuACK's or from ``primitives.device``. This module needs only the
standard library, because the jail (the process that traces a kernel file) imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Reduction(NamedTuple):
    """Reduce a tile to a vector along ``axis``: "row" gives one value per row, [M], and "column" gives one
    value per column, [N].

    ``fold``: maps the code of the running value and of new values to the code of the next running value, lane
    by lane. It is None if the resource takes a subtile's whole fragment. ``spoils``: whether the resource
    overwrites that fragment. ``identity``: the value of a lane beyond a ragged edge. ``finish``: the code
    that computes a value from its partial results, one per CTA tile. It uses ``{partial}``, or
    ``{partials}``: all partial results, each followed by a comma. ``{half}`` says whether the tile is half as
    wide as its GEMM. ``said``: a description of ``finish`` for people, with ``{kept}`` for the partial
    results.

    A reduction that ``selects`` takes one index per row as its second argument and returns one value per row.
    Its code also uses ``{index}`` and ``{extent}`` (the tile's number of columns). ``own_width``: if a
    reduction only takes tiles as wide as their GEMM, two suggestions to the author: for a tile of half the
    width, and for one of twice the width.
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
    kernel passes the width of heads to the resource. ``own_width``: as in Reduction."""

    resource: str
    own_width: tuple[str, str]


class Spread(NamedTuple):
    """A primitive that spreads a vector over a tile. ``role``: the role of the vector's kernel argument.
    ``lanes``: the code of its values in a pair of lanes, with ``{name}`` for the resource."""

    role: Literal["row", "column"]
    resource: str
    lanes: tuple[str, ...]
