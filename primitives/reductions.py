"""Family 4, reductions along rows and columns: partials a CTA tile, finished in a fixed order between steps.

To the author a reduction is a finished vector. Lanes outside a ragged tile count as its identity,
whatever the expression makes of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primitives.ir import Attribute, Operation, ProgramError, Reduction, Type, register
from primitives.trace import Tensor, apply


def reduces(name: str, how: Reduction) -> Callable[[tuple[Type, ...], Attribute], Type]:
    """The typing rule of a reduction: one tile in, a vector out."""

    def infer(types: tuple[Type, ...], attribute: Attribute) -> Type:
        if [t.kind for t in types] != ["tile"]:
            raise ProgramError(
                "arguments", f"{name} takes one tile, not {', '.join(map(str, types)) or 'nothing'}"
            )
        rows, columns = types[0].shape
        return Type("vector", (rows if how.axis == "row" else columns,))

    return infer


def _register(name: str, how: Reduction, torch: Callable[..., Any]) -> None:
    register(Operation(name, reduces(name, how), torch, reduction=how))


_register("row_sums", Reduction("row", "add"), lambda torch, t: t.sum(dim=-1))
_register("row_max", Reduction("row", "max"), lambda torch, t: t.amax(dim=-1))
_register("row_abs_max", Reduction("row", "max_abs"), lambda torch, t: t.abs().amax(dim=-1))
_register("column_sums", Reduction("column", "add"), lambda torch, t: t.sum(dim=0))
_register("column_max", Reduction("column", "max"), lambda torch, t: t.amax(dim=0))
_register("column_abs_max", Reduction("column", "max_abs"), lambda torch, t: t.abs().amax(dim=0))


def row_sums(t: Tensor) -> Tensor:
    """The sum of each row of a tile (of any width), of the unrounded values. It is final only after its step:
    use it in vector arithmetic, as an output, or spread with per_row in a *later* gemm's epilogue.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 1.5 instructions an element, 0.05 of them shuffles; 4 bytes a
    row and CTA tile, which a small kernel after the step adds up (one for all vectors of a length).
    Paper: family 4, reductions.

        total = row_sums(abs(t))
        share = total / t.columns
    """
    return apply("row_sums", t)


def row_max(t: Tensor) -> Tensor:
    """The largest value of each row of a tile; NaN is left out (a row of nothing else gives -inf); torch
    gives NaN. Final after its step, as row_sums.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 3 instructions an element, else as row_sums.
    Paper: family 4, reductions.

        peak = row_max(t)
        room = 8 - peak
    """
    return apply("row_max", t)


def row_abs_max(t: Tensor) -> Tensor:
    """The largest magnitude of each row of a tile: what a quantised output's scale is made from. NaN is left
    out (a row of nothing else gives 0); torch gives NaN. Final after its step, as row_sums.

    Shapes: [M, N] to [M]. Dtypes: fp32. Cost: 1.5 instructions an element, else as row_sums.
    Paper: family 4, reductions.

        size = row_abs_max(t)
        step = size / 240
    """
    return apply("row_abs_max", t)


def column_sums(t: Tensor) -> Tensor:
    """The sum of each column of a tile, of the unrounded values: gradients of biases and norm weights. Final
    after its step, as row_sums.

    Shapes: [M, N] to [N]. Dtypes: fp32. Cost: 3 instructions an element, 0.2 of them shuffles; 4 bytes a
    column and CTA tile, else as row_sums. Paper: family 4, reductions.

        total = column_sums(t)
        level = total / t.rows
    """
    return apply("column_sums", t)


def column_max(t: Tensor) -> Tensor:
    """The largest value of each column of a tile; NaN as for row_max. Final after its step, as row_sums.

    Shapes: [M, N] to [N]. Dtypes: fp32. Cost: 4 instructions an element, else as column_sums.
    Paper: family 4, reductions.

        peak = column_max(t)
        twice = 2 * peak
    """
    return apply("column_max", t)


def column_abs_max(t: Tensor) -> Tensor:
    """The largest magnitude of each column of a tile; NaN as for row_abs_max. Final after its step, as
    row_sums.

    Shapes: [M, N] to [N]. Dtypes: fp32. Cost: 3 instructions an element, else as column_sums.
    Paper: family 4, reductions.

        size = column_abs_max(t)
        step = size / 127
    """
    return apply("column_abs_max", t)
