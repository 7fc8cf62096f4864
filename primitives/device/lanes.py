"""Lanes of the accumulator and where they lie; memory that threads address themselves."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import EpiOp

__all__ = [
    "Memory",
    "column",
    "inside_columns",
    "inside_rows",
    "put",
    "put_head",
    "repeated",
    "take",
]


class Memory(EpiOp):
    """A tensor that threads address themselves: what no bulk copy brings in the lanes' own layout."""

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        dtype, rank = key
        return make_fake_tensor(
            dtype, tuple(cute.sym_int() for _ in range(rank)), leading_dim=rank - 1, divisibility=1
        )

    def param_fields(self) -> list[tuple[str, Any, Any]]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        return param


def column(place: Any, lane: Any, twice: Any, past: Any) -> Any:
    """The column of a tile over an accumulator lane; ``twice``: 1 for one twice as wide, -1 for half."""
    own = place.tile_column + place.column + cute.crd2idx(lane, place.columns)
    if twice == 0:
        return own
    return own * 2 + past if twice > 0 else own // 2


def row(place: Any, lane: Any) -> Any:
    """The row under an accumulator lane."""
    return place.tile_row + place.row + cute.crd2idx(lane, place.rows)


def inside_columns(place: Any, lane: Any) -> Any:
    """Whether an accumulator lane is a column of the matrix."""
    return cute.crd2idx(lane, place.columns) < place.extent[1] - place.tile_column - place.column


def inside_rows(place: Any, lane: Any) -> Any:
    """Whether an accumulator lane is a row of the matrix."""
    return cute.crd2idx(lane, place.rows) < place.extent[0] - place.tile_row - place.row


def take(place: Any, source: cute.Tensor, lane: Any, twice: Any, past: Any) -> Any:
    """A tile's or column vector's value over a lane; past an edge, that at the edge."""
    at = cutlass.min(column(place, lane, twice, past), source.shape[-1] - 1)
    if cute.rank(source) == 1:
        return source[at].to(Float32)
    return source[cutlass.min(row(place, lane), source.shape[0] - 1), at].to(Float32)


def repeated(place: Any, source: cute.Tensor, lane: Any, twice: Any, past: Any, width: int) -> Any:
    """A value that is the same for each head, ``width`` of the GEMM's columns wide."""
    offset = (place.column - place.thread + cute.crd2idx(lane, place.columns)) % width
    at = place.thread + offset
    at = at // 2 if twice < 0 else at
    if cute.rank(source) == 1:
        return source[at].to(Float32)
    return source[cutlass.min(row(place, lane), source.shape[0] - 1), at].to(Float32)


@dsl_user_op
def _store_if(
    condition: Any, target: cute.Tensor, at: Any, value: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store under a predicate. No branch: hundreds of them would compile for minutes, and a warp that they
    part may come to the epilogue's barriers in pieces."""
    rounded = Float32(value).to(target.element_type)
    narrow = target.element_type.width == 16
    bits = rounded.ir_value(loc=loc, ip=ip)
    pointer = (target.iterator + cute.crd2idx(at, target.layout, loc=loc, ip=ip)).toint(loc=loc, ip=ip)
    llvm.inline_asm(
        None,
        [
            Int32(cutlass.select_(condition, 1, 0)).ir_value(loc=loc, ip=ip),
            pointer.ir_value(loc=loc, ip=ip),
            llvm.bitcast(T.i16(), bits, loc=loc, ip=ip) if narrow else bits,
        ],
        "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global." + ("b16" if narrow else "f32") + " [$1], $2;}",
        "r,l,h" if narrow else "r,l,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def put(place: Any, target: cute.Tensor, lane: Any, twice: Any, past: Any, value: Any) -> None:
    """Store a value over a lane, unless it lies past an edge."""
    down, across = row(place, lane), column(place, lane, twice, past)
    inside = (down < target.shape[0]) & (across < target.shape[1])
    _store_if(inside, target, (down, across), value)


def put_head(place: Any, target: cute.Tensor, lane: Any, width: Any, value: Any) -> None:
    """Store a statistic of a head [M, heads]: by the thread with the head's first column."""
    down, across = row(place, lane), column(place, lane, 0, 0)
    first = (down < target.shape[0]) & (across < place.extent[1]) & (across % width == 0)
    _store_if(first, target, (down, across // width), value)
