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
    """The sum of each row of a tile [M, N] (of any width), as a vector [M] in fp32.

    It sees the unrounded values. It is final only after its step: use it in vector arithmetic, as an
    output, or spread with per_row in a *later* gemm's epilogue. Cost: N / tile_n partials a row.
    Paper: partial reductions. ``mean = row_sums(t) / t.columns``
    """
    return apply("row_sums", t)


def row_max(t: Tensor) -> Tensor:
    """The largest value of each row of a tile, as a vector [M] in fp32; final after its step, as row_sums."""
    return apply("row_max", t)


def row_abs_max(t: Tensor) -> Tensor:
    """The largest magnitude of each row of a tile, as a vector [M] in fp32: what a quantised output's scale
    is made from. Final after its step. ``scale = row_abs_max(t) / 448``
    """
    return apply("row_abs_max", t)


def column_sums(t: Tensor) -> Tensor:
    """The sum of each column of a tile [M, N], as a vector [N] in fp32: gradients of biases and norm weights.

    It sees the unrounded values and is final after its step. Cost: M / tile_m partials a column.
    ``means = column_sums(t) / t.rows``
    """
    return apply("column_sums", t)


def column_max(t: Tensor) -> Tensor:
    """The largest value of each column of a tile, as a vector [N] in fp32; final after its step."""
    return apply("column_max", t)


def column_abs_max(t: Tensor) -> Tensor:
    """The largest magnitude of each column of a tile, as a vector [N] in fp32; final after its step."""
    return apply("column_abs_max", t)
