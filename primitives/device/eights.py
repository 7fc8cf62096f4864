"""Stores of 8-bit tiles at another width than their GEMM's. Conversions to fp8 saturate, on Hopper by the
instruction itself."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op
from quack.epilogue.ops import TileStore

from primitives.device.lanes import column, row

__all__ = ["EightStore", "put_four"]


class EightStore(TileStore):
    """A tile half as wide as its GEMM, by TMA. QuACK moves its lanes as it does for 8 bits elsewhere, but
    asks for 16 bits on Hopper."""

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        self.gated = False  # read here for that check alone
        try:
            return super().to_params(gemm, args)
        finally:
            self.gated = True


@dsl_user_op
def _store_if(
    condition: Any, target: cute.Tensor, at: Any, bits: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four bytes under a predicate, without a branch."""
    pointer = (target.iterator + cute.crd2idx(at, target.layout, loc=loc, ip=ip)).toint(loc=loc, ip=ip)
    llvm.inline_asm(
        None,
        [
            Int32(cutlass.select_(condition, 1, 0)).ir_value(loc=loc, ip=ip),
            pointer.ir_value(loc=loc, ip=ip),
            bits.ir_value(loc=loc, ip=ip),
        ],
        "{.reg .pred p; setp.ne.s32 p, $0, 0; @p st.global.b32 [$1], $2;}",
        "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def put_four(place: Any, target: cute.Tensor, lane: Any, twice: Any, past: Any, *values: Any) -> None:
    """Store the four values over a pair of lanes of a tile twice as wide as its GEMM, unless they lie past an
    edge: rows are multiples of 16 bytes, so that no four straddle one."""
    wide = cute.make_rmem_tensor(4, Float32)
    for k, value in enumerate(values):
        wide[k] = Float32(value)
    bits = cute.recast_tensor(wide.to(target.element_type), Int32)[0]
    down, across = row(place, lane), column(place, lane, twice, past)
    _store_if((down < target.shape[0]) & (across < target.shape[1]), target, (down, across), bits)
