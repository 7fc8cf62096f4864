"""What the CuTeDSL of a primitive is, where that is more than an expression over registers: said in the
primitive's own file, asked by the writers of kernels (``gemm_codegen``, ``vector_codegen``).

Texts are templates. A ``resource`` is the constructor of what an epilogue has beside its accumulator, QuACK's
or one of ``primitives.device``, over its ``name``. Standard library only: the jail imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Reduction(NamedTuple):
    """How a tile becomes a vector along ``axis``: "row" gives a value a row, [M]; "column" one a column.

    ``fold``: the running value's text and new ones' -> the next running value's, lane by lane. None where
    the resource takes a whole subtile's fragment; it ``spoils`` that where it writes to it. ``identity``:
    what a lane past a ragged edge counts as. ``finish`` is a value's text from its partials, one a CTA tile:
    ``{partial}``, or ``{partials}`` with a comma behind each, and ``{half}``, whether the tile is half as
    wide as its GEMM. ``said``: the same for people, of partials ``{kept}``.

    One that ``selects`` takes an index a row, its second argument, and leaves one value a row: its texts have
    ``{index}`` too, and ``{extent}``, the tile's columns. ``own_width``: where it takes only tiles as wide as
    their GEMM, what to write instead of one half and of one twice as wide.
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
    """A value a head, of a sweep before the epilogue: the resource's argument is the width of heads.
    ``own_width``: as of Reduction."""

    resource: str
    own_width: tuple[str, str]


class Spread(NamedTuple):
    """A vector over a tile: its argument's ``role``, and what it is in a pair of lanes, over ``name``."""

    role: Literal["row", "column"]
    resource: str
    lanes: tuple[str, ...]
