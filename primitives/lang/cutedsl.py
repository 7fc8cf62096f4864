"""CuTeDSL text of primitives that need more than an expression over registers. Each is declared in its
primitive's file, and used by ``gemm_codegen`` and ``vector_codegen``.

Texts are templates. A ``resource`` is the constructor of an epilogue's helper object, QuACK's or one of
``primitives.device``, over its ``name``. Standard library only: the jail imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


class Reduction(NamedTuple):
    """Reduce a tile to a vector along ``axis``: "row" gives one value per row, [M]; "column" one per column,
    [N].

    ``fold``: maps the texts of the running value and of new values to the next running value's text, lane by
    lane. None if the resource takes a whole subtile's fragment; if the resource overwrites that fragment, it
    ``spoils`` it. ``identity``: the value of a lane past a ragged edge. ``finish``: the text of a value from
    its partials, one per CTA tile. It uses ``{partial}``, or ``{partials}`` with a comma after each, and
    ``{half}``, whether the tile is half as wide as its GEMM. ``said``: the same for people, with partials
    ``{kept}``.

    A reduction that ``selects`` takes one index per row as its second argument and returns one value per row.
    Its texts also use ``{index}`` and ``{extent}``, the number of the tile's columns. ``own_width``: for a
    reduction that takes only tiles as wide as their GEMM, the suggestions for a tile half as wide and for one
    twice as wide.
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
    """One value per head, from a sweep before the epilogue. The resource's argument is the width of heads.
    ``own_width``: as in Reduction."""

    resource: str
    own_width: tuple[str, str]


class Spread(NamedTuple):
    """A vector spread over a tile: its argument's ``role``, and its texts in a pair of lanes, over
    ``name``."""

    role: Literal["row", "column"]
    resource: str
    lanes: tuple[str, ...]
