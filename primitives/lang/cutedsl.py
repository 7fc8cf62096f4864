"""Types that describe the CuTeDSL code of reductions, head statistics and spread vectors. For these
primitives, an expression over registers is not enough.

The file of a primitive declares the primitive's code templates, which ``gemm_codegen`` and ``vector_codegen``
use. A ``resource`` is a template for the constructor call of an epilogue's helper object, with ``{name}`` for
the object's name. The object's class is from QuACK or from ``primitives.device``. This module needs only the
standard library, because the jail (the process that traces a kernel file) imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Reduction(NamedTuple):
    """A reduction of a tile to a vector. ``axis``: "row" gives one value per row, [M], and "column" gives one
    value per column, [N].

    ``fold``: a function that takes the code of a lane's running value and the code of new values, and returns
    the code of the next running value. ``fold`` is None if the resource takes a subtile's whole fragment.
    ``spoils``: whether the resource overwrites the fragment. ``identity``: the value that stands for a lane
    beyond a ragged edge. ``finish``: the code that combines the partial results of all CTA tiles into one
    value. In ``finish``, ``{partial}`` is the name of the first buffer of partial results. ``{partials}``
    lists the names of all buffers of partial results, each followed by a comma. ``{half}`` is True if the
    tile is half as wide as its GEMM, otherwise False. ``said``: a description of ``finish`` for people, with
    ``{kept}`` for the partial results.

    ``selects``: whether the reduction takes one index per row as its second argument, and returns one value
    per row. The code of such a reduction also uses ``{index}`` and ``{extent}`` (the tile's number of
    columns). ``own_width``: two suggestions to the author, if the reduction takes only tiles as wide as their
    GEMM. The first suggestion is for a tile of half that width, the second for a tile of twice that width.
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
    """A primitive that computes one value per head. The values are computed in a sweep over the accumulator
    before the epilogue. ``resource``: a template as in Reduction; the kernel passes the width of heads to the
    object. ``own_width``: as in Reduction."""

    resource: str
    own_width: tuple[str, str]


class Spread(NamedTuple):
    """A primitive that spreads a vector over a tile. ``role``: the role of the vector's kernel argument.
    ``lanes``: the code of the vector's value in each of two adjacent lanes, or one code that serves both
    lanes. In this code, ``{name}`` is the name of the resource."""

    role: Literal["row", "column"]
    resource: str
    lanes: tuple[str, ...]
