"""CuTeDSL of primitives that need more than an expression over registers: declared in the primitive's own
file, used by ``gemm_codegen`` and ``vector_codegen``.

Texts are templates. A ``resource`` is the constructor of an epilogue's helper object, QuACK's or one of
``primitives.device``, over its ``name``. Standard library only: the jail imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Reduction(NamedTuple):
    """A tile's reduction to a vector along ``axis``: "row" gives a value a row, [M]; "column" one a column.

    ``fold``: a text of the running value and new values -> the next running value, lane by lane. None where
    the resource takes a whole subtile's fragment; it ``spoils`` that fragment if it writes to it.
    ``identity``: the value of a lane past a ragged edge. ``finish`` is the text of a value from its partials,
    one a CTA tile: ``{partial}``, or ``{partials}`` with a comma behind each, and ``{half}``, whether the
    tile is half as wide as its GEMM. ``said``: the same for people, with partials ``{kept}``.

    A reduction that ``selects`` takes an index a row as its second argument and leaves one value a row: its
    texts also have ``{index}`` and ``{extent}``, the tile's columns. ``own_width``: for a reduction that
    takes only tiles as wide as their GEMM, the remedies for one half and for one twice as wide.
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
    """A value a head, from a sweep before the epilogue; the resource's argument is the width of heads.
    ``own_width``: as in Reduction."""

    resource: str
    own_width: tuple[str, str]


class Spread(NamedTuple):
    """A vector spread over a tile: its argument's ``role``, and its text in a pair of lanes, over ``name``.
    """

    role: Literal["row", "column"]
    resource: str
    lanes: tuple[str, ...]
