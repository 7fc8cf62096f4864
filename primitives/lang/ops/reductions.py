"""Family 4, reductions along rows and columns. Each CTA tile writes partial results. A vector kernel, which
runs between steps, combines the partial results in a fixed order.

The author of a kernel file does not see partial results: a reduction returns a finished vector. Lanes beyond
a ragged edge count as the reduction's identity, even if the expression has another value there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from coda_agent.primitives.lang.cutedsl import Reduction
from coda_agent.primitives.lang.ir import Attribute, Derivative, Operation, Sides, register
from coda_agent.primitives.lang.signature import Type, sole
from coda_agent.primitives.lang.trace import Tensor, apply

Rule = Callable[[tuple[Type, ...], Attribute], Type]
Torch = Callable[..., Any]
Page = Callable[..., Tensor]
EXTREMUM = "an extremum is a statistic without a derivative: gradients stop there"


def reduces(
    how: Reduction,
    *,
    torch: Torch,
    rule: Rule | None = None,
    sides: Callable[..., Sides] | None = None,
    derivative: Derivative | None = None,
) -> Callable[[Page], Page]:
    """Return a decorator that makes a documented function a reduction of its first argument. ``rule``: the
    typing rule, for a reduction that takes other arguments besides the tile. ``sides``: see ``Operation``. A
    reduction without a derivative is an extremum."""

    def decorate(function: Page) -> Page:
        name = function.__name__
        infer = rule or _of_a_tile(name, how)
        caveat = "" if derivative else EXTREMUM
        meanings = Operation(name, infer, torch, reduction=how, sides=sides)
        register(meanings._replace(derivative=derivative, caveat=caveat))
        return function

    return decorate


def _of_a_tile(name: str, how: Reduction) -> Rule:
    """The typing rule of a reduction that takes one tile and returns a vector."""

    def infer(types: tuple[Type, ...], attribute: Attribute) -> Type:
        rows, columns = sole(name, "tile", types).shape
        return Type("vector", (rows if how.axis == "row" else columns,))

    return infer


class Fold(NamedTuple):
    """A way to combine many values into one, along either axis. ``lanes`` takes the code of the running value
    and the code of new values, and returns the code of the next running value. ``identity``: the value that
    does not change a running value. ``across``: how the running values of threads and CTA tiles are combined.
    "add" starts from 0, "max" from -inf, and "max_abs" from 0. ``finished``: a code template that is applied
    to the combined value."""

    lanes: Callable[[str, Sequence[str]], str]
    identity: float
    across: Literal["add", "max", "max_abs"]
    finished: str = "{0}"

    def along(self, axis: Literal["row", "column"]) -> Reduction:
        """The reduction along ``axis``. Each CTA tile writes partial results, and a vector kernel after the
        step combines the partial results of all CTA tiles."""
        if axis == "row":
            resource, finish = "RowPartials", f'finish_row({{partial}}, at, lane, "{self.across}")'
        else:
            resource = "ColumnPartials"
            finish = f'finish_column(({{partials}}), at, lane, "{self.across}", {{half}})'
        said = f"{'sum' if self.across == 'add' else 'max'}({{kept}})"
        return Reduction(
            axis,
            f'{resource}("{{name}}", "{self.across}")',
            self.finished.format(finish),
            self.finished.format(said),
            self.lanes,
            self.identity,
        )


def largest(value: str) -> Callable[[str, Sequence[str]], str]:
    """Return a function for ``Fold.lanes`` that computes a running maximum. ``value``: a code template that
    is applied to each new value."""

    def lanes(running: str, values: Sequence[str]) -> str:
        for each in values:
            running = f"largest({running}, {value.format(each)})"
        return running

    return lanes


def _halves(axis: int, extremum: Torch) -> Callable[..., Sides]:
    """Return the ``Operation.sides`` of an extremum along an axis. The first side is chosen if the extremum
    lies in the first half of the axis, and the second side if it lies in the second half."""

    def sides(torch: Any, t: Any) -> Sides:
        first, second = t.tensor_split([(t.shape[axis] + 1) // 2], axis)
        a, b = extremum(torch, first), extremum(torch, second if second.numel() else first)
        return (a > b, a), (b > a, b)

    return sides


def _max(axis: int) -> Torch:
    return lambda torch, t: t.amax(dim=axis)


def _abs_max(axis: int) -> Torch:
    return lambda torch, t: t.abs().amax(dim=axis)


SUM = Fold(lambda running, values: f"{running} + ({' + '.join(values)})", 0.0, "add")
MAX = Fold(largest("{0}"), -math.inf, "max")
MAX_ABS = Fold(largest("magnitude({0})"), 0.0, "max_abs")


@reduces(
    SUM.along("row"),
    torch=lambda torch, t: t.sum(dim=-1),
    derivative=lambda g, y, t: (apply("as_tile", apply("per_row", g), t),),
)
def row_sums(t: Tensor) -> Tensor:
    """The sum of each row of a tile (of any width), over unrounded values. Final only after its step.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 1.5 instructions an element, 0.05 of them shuffles; 4 bytes a
    row and CTA tile, and a small kernel after the step.
    Paper: family 4, reductions.

        total = row_sums(abs(t))
        share = total / t.columns
    """
    return apply("row_sums", t)


@reduces(MAX.along("row"), torch=_max(1), sides=_halves(1, _max(1)))
def row_max(t: Tensor) -> Tensor:
    """The largest value of each row of a tile. NaN is ignored (a row of only NaN gives -inf); torch gives
    NaN. Final after its step, as row_sums.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 3 instructions an element, else as row_sums.
    Paper: family 4, reductions.

        peak = row_max(t)
        room = 8 - peak
    """
    return apply("row_max", t)


@reduces(MAX_ABS.along("row"), torch=_abs_max(1), sides=_halves(1, _abs_max(1)))
def row_abs_max(t: Tensor) -> Tensor:
    """The largest magnitude of each row of a tile. NaN is ignored (a row of only NaN gives 0); torch gives
    NaN. Final after its step, as row_sums.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 1.5 instructions an element, else as row_sums.
    Paper: family 4, reductions.

        size = row_abs_max(t)
        step = size / 240
    """
    return apply("row_abs_max", t)


@reduces(
    SUM.along("column"),
    torch=lambda torch, t: t.sum(dim=0),
    derivative=lambda g, y, t: (apply("as_tile", apply("per_column", g), t),),
)
def column_sums(t: Tensor) -> Tensor:
    """The sum of each column of a tile, over unrounded values. Final after its step, as row_sums.

    Shapes: [M, N] to [N]. Dtypes: fp32. Cost: 3 instructions an element, 0.2 of them shuffles; 4 bytes a
    column and CTA tile, else as row_sums. Paper: family 4, reductions.

        total = column_sums(t)
        level = total / t.rows
    """
    return apply("column_sums", t)


@reduces(MAX.along("column"), torch=_max(0), sides=_halves(0, _max(0)))
def column_max(t: Tensor) -> Tensor:
    """The largest value of each column of a tile; NaN as for row_max. Final after its step, as row_sums.

    Shapes: [M, N] to [N]. Dtypes: fp32. Cost: 4 instructions an element, else as column_sums.
    Paper: family 4, reductions.

        peak = column_max(t)
        twice = 2 * peak
    """
    return apply("column_max", t)


@reduces(MAX_ABS.along("column"), torch=_abs_max(0), sides=_halves(0, _abs_max(0)))
def column_abs_max(t: Tensor) -> Tensor:
    """The largest magnitude of each column of a tile; NaN as for row_abs_max. Final after its step, as
    row_sums.

    Shapes: [M, N] to [N]. Dtypes: fp32. Cost: 3 instructions an element, else as column_sums.
    Paper: family 4, reductions.

        size = column_abs_max(t)
        step = size / 127
    """
    return apply("column_abs_max", t)
