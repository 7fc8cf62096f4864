"""Family 4, reductions along rows: partial sums a tile, finished in a fixed order between steps.

To the author a reduction is a finished vector. Lanes outside a ragged tile count as its identity,
whatever the expression makes of zeros.
"""

from __future__ import annotations

from primitives.ir import Attribute, Operation, ProgramError, Type, register
from primitives.trace import Tensor, apply


def _rows(types: tuple[Type, ...], attribute: Attribute) -> Type:
    if [t.kind for t in types] != ["tile"]:
        raise ProgramError(
            "arguments", f"row_sums takes one tile, not {', '.join(map(str, types)) or 'nothing'}"
        )
    return Type("vector", types[0].shape[:1])


register(Operation("row_sums", _rows, lambda torch, t: t.sum(dim=-1)))


def row_sums(t: Tensor) -> Tensor:
    """The sum of each row of a tile [M, N] (of any width), as a vector [M] in fp32.

    It sees the unrounded values. It is final only after its step: use it in vector arithmetic, as an
    output, or spread with per_row in a *later* gemm's epilogue. Cost: N / tile_n partials a row.
    Paper: partial reductions. ``mean = row_sums(t) / t.columns``
    """
    return apply("row_sums", t)
