"""A GEMM of rows that are sorted by expert, each expert with its own B: QuACK's ``varlen_m``.

A tile holds rows of one expert. QuACK's loads and stores of tiles and vectors know where the expert's rows
begin and end; this module tells it to what threads address themselves.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from primitives.device.lanes import Memory
from primitives.device.mainloop import FusedGemm

__all__ = ["Bounds", "GroupedGemm", "Rows"]

WARP = 32


class GroupedGemm(FusedGemm):
    """Base of a step with offsets. Its places count rows from the first expert's first row, and end with the
    tile's own expert's rows."""

    def epi_begin(self, *given: Any, **named: Any) -> Any:
        states = super().epi_begin(*given, **named)
        lanes, tile, (rows, columns) = states["place"]
        first = given[6].params.cu_seqlens_m[tile[3]]
        states["place"] = (lanes, tile, (first + rows, columns))
        states["first"] = first
        return states

    def epi_begin_loop(self, params: Any, states: Any, at: Any) -> Any:
        found = super().epi_begin_loop(params, states, at)
        place = found["place"]
        found["place"] = place._replace(tile_row=place.tile_row + states["first"])
        return found


class Rows(Memory):
    """A matrix that threads address themselves, up to the last row of the tile's expert."""

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        past = ctx.varlen_manager.params.cu_seqlens_m[ctx.batch_idx + 1]
        return cute.make_tensor(
            param.iterator, cute.make_layout((past, param.shape[1]), stride=param.stride)
        )


class Bounds:
    """Offsets that rise from 0 to the number of rows: the given ones, if they do, else the nearest before
    that do. So no kernel reads or writes past a tensor's end, whatever offsets it is given, and every row
    belongs to one expert. One warp takes 32 offsets at a time."""

    @cute.jit
    def __call__(self, given: cute.Tensor, rows: Int32, made: cute.Tensor, stream: Any) -> None:
        self.kernel(given, rows, made).launch(grid=[1, 1, 1], block=[WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, given: cute.Tensor, rows: Int32, made: cute.Tensor) -> None:
        lane, last = cute.arch.lane_idx(), given.shape[0] - 1
        highest = Int32(0)
        for chunk in cutlass.range(cute.ceil_div(given.shape[0], WARP)):
            at = chunk * WARP + lane
            value = cutlass.min(cutlass.max(given[cutlass.min(at, last)], highest), rows)
            value = Int32(cutlass.select_(at == 0, Int32(0), cutlass.select_(at >= last, rows, value)))
            for step in cutlass.range_constexpr(5):
                # a lane without one before it gets its own value
                before = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
                value = cutlass.max(value, before)
            highest = cute.arch.shuffle_sync(value, WARP - 1)
            if at <= last:
                made[at] = value
