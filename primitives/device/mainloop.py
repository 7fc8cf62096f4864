"""CODA's GEMM on QuACK's Hopper mainloop, its reductions, and fragments of registers.

Register values are fp32. A fragment holds a thread's accumulator lanes of one epilogue subtile, with
adjacent columns adjacent, so lanes 2i and 2i+1 are a pair. Names follow QuACK: its "col" is a vector
of length M, its "row" one of length N.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Optional

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import ColVecReduce, RowVecReduce
from quack.gemm_sm90 import GemmSm90
from quack.rounding import RoundingMode
from quack.sm90_utils import partition_for_epilogue

__all__ = [
    "ColumnPartials",
    "FusedGemm",
    "RowPartials",
    "arguments",
    "fold",
    "fragment",
    "half_fragment",
    "pack",
    "unpack",
    "wide_fragment",
]

EVICT_FIRST = 0x12F0000000000000  # the L2 policy that CUTLASS uses for data touched once


def arguments(resources: tuple[Any, ...], adds: bool = False) -> Any:
    """The argument tuple of a step's kernel: one optional field a resource. ``adds``: D += value, by a bulk
    reduce-add store that reads no D."""
    fields = [(r.name, r.arg_spec_type(getattr(r, "baked", False))) for r in resources]
    fields += [("split_k_semaphore", Optional[cute.Tensor]), ("split_k_workspace", Optional[cute.Tensor])]
    made = NamedTuple("EpilogueArguments", fields)  # type: ignore[misc]  # noqa: UP014  (fields are computed)
    made.__new__.__defaults__ = (None,) * len(fields)  # type: ignore[attr-defined]
    made = mlir_namedtuple(made)
    made.add_to_output = adds  # type: ignore[attr-defined]
    return made


class Place(NamedTuple):
    """Where a thread's lanes of a subtile lie: offsets of lanes (layouts), the first lane's row and column in
    the CTA tile (``thread`` is that column's part which differs by thread), the tile's own, and the
    matrix's extents."""

    rows: Any
    columns: Any
    row: Any
    column: Any
    thread: Any
    tile_row: Any
    tile_column: Any
    extent: tuple[Any, Any]


class FusedGemm(ComposableEpiMixin, GemmSm90):
    """Base of every step: a lowered class adds its resources and the visitor of a subtile."""

    deep = False  # this and the hints: set per compile from the schedule
    evict_loads = False
    evict_stores = False
    head_widths = ()  # set per compile from the sizes of static dims
    _extra_param_fields = (
        ("split_k_semaphore", Optional[cute.Tensor], None),
        ("split_k_workspace", Optional[cute.Tensor], None),
    )

    def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
        self.rounding_mode = RoundingMode.RN
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

    def _compute_stages(self, *sizes: Any, **more: Any) -> tuple[int, int, int]:
        """Stages of operands, stores and loads. A large epilogue gives up load stages to the mainloop, which
        waits for itself forever with one stage of operands. A deep mainloop takes store stages too: the more
        operands are under way, the less it waits for an L2 that the epilogue keeps busy."""
        stages = self._stages(sizes, more, loads=self.epi_c_stage_base)
        if stages[0] < 3:
            stages = self._stages(sizes, more, loads=2)
        if self.deep:
            tile, epi_tile, d_dtype, arguments = sizes[0], sizes[1], sizes[4], sizes[6]
            store = self.epi_smem_bytes(arguments, tile, epi_tile, sizes[9]).d_stage
            if d_dtype is not None:
                store += cute.size(cute.shape(epi_tile)) * d_dtype.width // 8
            roomier = (*sizes[:7], sizes[7] + store, *sizes[8:])
            operands, stores, loads = self._stages(roomier, more, loads=2)
            if operands > stages[0]:
                stages = operands, stores - 1, loads
        if stages[0] < 2:
            raise ValueError(
                f"this tile's epilogue leaves shared memory for {stages[0]} stage(s) of operands"
            )
        return stages

    def _stages(self, sizes: Any, more: Any, loads: int) -> tuple[int, int, int]:
        """QuACK's split of shared memory, starting from at most so many stages of loads."""
        kind = type(self)
        usual = kind.epi_c_stage_base
        kind.epi_c_stage_base = min(loads, usual)
        try:
            return super()._compute_stages(*sizes, **more)
        finally:
            kind.epi_c_stage_base = usual

    def epilog_gmem_copy_and_partition(self, atom: Any, *args: Any) -> Any:
        copy, source, target = super().epilog_gmem_copy_and_partition(atom, *args)
        if isinstance(atom.op, cpasync.CopyReduceBulkTensorTileS2GOp):
            return copy, source, target
        stores = isinstance(atom.op, cpasync.CopyBulkTensorTileS2GOp)
        if self.evict_stores if stores else self.evict_loads:
            # Streamed once: leave the L2 to the operands, which other tiles read again.
            copy = partial(copy, cache_policy=Int64(EVICT_FIRST))
        return copy, source, target

    def epi_begin(
        self,
        params: Any,
        smem: Any,
        epi_tile: Any,
        tiled_copy_t2r: Any,
        tiled_copy_r2s: Any,
        tile: Any,
        varlen: Any,
        barrier: Any,
        thread: Any,
        layout: Any = None,
    ) -> Any:
        states = super().epi_begin(
            params, smem, epi_tile, tiled_copy_t2r, tiled_copy_r2s, tile, varlen, barrier, thread, layout
        )
        own = cute.make_identity_tensor(self.cta_tile_shape_mnk[:2])
        lanes = partition_for_epilogue(
            own, epi_tile=epi_tile, tiled_copy=tiled_copy_r2s, tidx=thread, reference_src=True
        )
        states["place"] = (lanes, tile, (varlen.len_m(tile[3]), varlen.len_n()))
        return states

    def epi_begin_loop(self, params: Any, states: Any, at: Any) -> Any:
        found = super().epi_begin_loop(params, states, at)
        lanes, tile, extent = states["place"]
        here = lanes[None, None, None, at[0], at[1]]
        shape = self.cta_tile_shape_mnk[:2]
        found["place"] = Place(
            cute.composition(cute.make_layout(shape, stride=(1, 0)), here.layout),
            cute.composition(cute.make_layout(shape, stride=(0, 1)), here.layout),
            here[0][0],
            here[0][1],
            lanes[None, None, None, 0, 0][0][1],
            tile[0] * shape[0],
            tile[1] * shape[1],
            extent,
        )
        return found

    @cute.jit
    def epi_prepass_end(self, params: Any, states: Any) -> None:
        """After the sweep: statistics of heads become final, across lanes and then across warps."""
        sums = [op for op in self._epi_ops if hasattr(op, "fn_prepass_end")]
        for op in sums:
            op.fn_prepass_end(self, states[op.name])
        self.epilogue_barrier.arrive_and_wait()
        for op in sums:
            if const_expr(op.prepass_resolve_needed(self)):
                op.fn_prepass_resolve(self, states[op.name])


class RowPartials(ColVecReduce):
    """A value a row and CTA tile along N, [1, M, tiles]; the visitor leaves out lanes past the edge."""

    def _mask_oob_active(self) -> bool:
        return False


class ColumnPartials(RowVecReduce):
    """A value a column and CTA tile along M, [1, tiles, N]."""

    def _mask_oob_active(self) -> bool:
        return False


def resource(gemm: Any, name: str) -> Any:
    """A step's resource by its name."""
    return next(op for op in gemm._epi_ops if op.name == name)


def fold(gemm: Any, name: str, state: Any, values: cute.Tensor) -> None:
    """A whole subtile of values into a reduction that works on blocks."""
    resource(gemm, name).fn_sink_flush(gemm, state, values)


def wide_fragment(accumulator: cute.Tensor) -> cute.Tensor:
    """An fp32 fragment with two values an accumulator lane."""
    return cute.make_rmem_tensor(cute.recast_layout(1, 2, accumulator.layout), Float32)


def half_fragment(accumulator: cute.Tensor) -> cute.Tensor:
    """An fp32 fragment with one value a pair of accumulator lanes."""
    return cute.make_rmem_tensor(cute.recast_layout(2, 1, accumulator.layout).shape, Float32)


def fragment(accumulator: cute.Tensor) -> cute.Tensor:
    """An fp32 fragment like the accumulator's."""
    return cute.make_rmem_tensor(accumulator.layout.shape, Float32)


def unpack(packed: cute.Tensor, dtype: Any) -> cute.Tensor:
    """Two 16-bit values a 32-bit lane, as fp32."""
    return cute.recast_tensor(packed, dtype).to(Float32)


def pack(wide: cute.Tensor, dtype: Any, target: cute.Tensor) -> None:
    """Round two values a lane to 16 bits each and write them as 32-bit lanes of ``target``."""
    target.store(cute.recast_tensor(wide.to(dtype), Float32).load())
