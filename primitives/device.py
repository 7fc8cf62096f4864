"""What lowered modules are written in: CODA's GEMM on QuACK's Hopper mainloop, and helpers on registers.

Register values are fp32. A fragment holds a thread's accumulator lanes of one epilogue subtile, with
adjacent columns adjacent, so lanes 2i and 2i+1 are a pair. Names follow QuACK: its "col" is a vector
of length M, its "row" one of length N. Imports cutlass: only lowered modules import this.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from quack.activation import sigmoid  # noqa: F401  (part of the lowered vocabulary)
from quack.activation import sigmoid_tanh as sigmoid_fast  # noqa: F401
from quack.activation import tanh as tanh_fast
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import ColVecReduce
from quack.gemm_sm90 import GemmSm90
from quack.rounding import RoundingMode

EVICT_FIRST = 0x12F0000000000000  # the L2 policy that CUTLASS uses for data touched once


def arguments(resources: tuple[Any, ...]) -> Any:
    """The argument tuple of a step's kernel: one optional field a resource."""
    fields = [(r.name, r.arg_spec_type()) for r in resources]
    fields += [("split_k_semaphore", Optional[cute.Tensor]), ("split_k_workspace", Optional[cute.Tensor])]
    made = NamedTuple("EpilogueArguments", fields)  # type: ignore[misc]  # noqa: UP014  (fields are computed)
    made.__new__.__defaults__ = (None,) * len(fields)  # type: ignore[attr-defined]
    made = mlir_namedtuple(made)
    made.add_to_output = False  # type: ignore[attr-defined]
    return made


class FusedGemm(ComposableEpiMixin, GemmSm90):
    """Base of every step: a lowered class adds its resources and the visitor of a subtile."""

    evict_loads = False  # set per compile from the schedule
    evict_stores = False
    _extra_param_fields = (
        ("split_k_semaphore", Optional[cute.Tensor], None),
        ("split_k_workspace", Optional[cute.Tensor], None),
    )

    def epi_to_underlying_arguments(self, args: Any, *, loc: Any = None, ip: Any = None) -> Any:
        self.rounding_mode = RoundingMode.RN
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

    def epilog_gmem_copy_and_partition(self, atom: Any, *args: Any) -> Any:
        copy, source, target = super().epilog_gmem_copy_and_partition(atom, *args)
        stores = isinstance(atom.op, cpasync.CopyBulkTensorTileS2GOp)
        if self.evict_stores if stores else self.evict_loads:
            # Streamed once: leave the L2 to the operands, which other tiles read again.
            copy = partial(copy, cache_policy=Int64(EVICT_FIRST))
        return copy, source, target


class RowSum(ColVecReduce):
    """Partial sums along N, [1, M, tiles]; lanes past a ragged edge are left out where ``masked``."""

    def __init__(self, name: str, masked: bool):
        super().__init__(name)
        self.masked = masked

    def config_key(self) -> tuple[Any, ...]:
        return (*super().config_key(), self.masked)

    def _mask_oob_active(self) -> bool:
        return self.masked


def choose(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, else ``b``: a select, no branch."""
    if isinstance(condition, bool):  # of two literals
        return Float32(a if condition else b)
    return cutlass.select_(condition, Float32(a), Float32(b))


def tanh(x: Any) -> Any:
    """tanh to about 2 ulp, where tanh.approx has 2**-11."""
    return 2.0 * sigmoid(2.0 * x) - 1.0


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


def edge(gemm: Any, state: Any) -> tuple[Any, Any]:
    """For a masked reduction: the offsets of lanes along N, and how many columns are left."""
    _, coordinates, limit = state
    offsets = cute.composition(
        cute.make_layout(gemm.cta_tile_shape_mnk[:2], stride=(0, 1)), coordinates.layout
    )
    return offsets, limit - coordinates[0][1]


def inside(offsets: Any, lane: Any, left: Any) -> Any:
    """Whether an accumulator lane is a column of the matrix."""
    return cute.crd2idx(lane, offsets) < left


LANES_PER_ROW = 8
BLOCK = 256


@cute.jit
def sum_partials(partials: cute.Tensor, row: Any, lane: Any) -> Float32:
    """The sum of a row of partials [1, M, tiles] by ``LANES_PER_ROW`` lanes, in a fixed order."""
    total = Float32(0.0)
    for tile in cutlass.range(lane, partials.shape[2], LANES_PER_ROW):
        total += partials[0, row, tile]
    for step in cutlass.range_constexpr(3):
        total += cute.arch.shuffle_sync_bfly(total, offset=LANES_PER_ROW >> (step + 1))
    return total


__all__ = [
    "BLOCK",
    "LANES_PER_ROW",
    "FusedGemm",
    "RowSum",
    "arguments",
    "choose",
    "const_expr",
    "edge",
    "fragment",
    "half_fragment",
    "inside",
    "pack",
    "sigmoid",
    "sigmoid_fast",
    "sum_partials",
    "tanh",
    "tanh_fast",
    "unpack",
    "wide_fragment",
]
