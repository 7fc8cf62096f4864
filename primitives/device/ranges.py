"""Ranges of a tile's columns, each stored in a tensor of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from quack import layout_utils
from quack.compile_utils import div_for_dtype, fake_batched
from quack.epilogue.ops import EpiOp, TileStore, setup_epi_tensor

__all__ = ["Range", "RangeStore", "within"]


def _fake(key: Any, fctx: Any) -> Any:
    """A stand-in for a range's tensor, which has columns of its own."""
    dtype, _ = key
    divisor = div_for_dtype(dtype)
    return fake_batched(dtype, fctx.m, cute.sym_int(divisibility=divisor), None, 1, divisor)


def holds(at: Any, extent: Any) -> Any:
    """Whether a stage is stored whose first column is this one of a range: a bulk store leaves out what lies
    past its tensor's end, but must not begin before its first column."""
    return (at >= 0) & (at < extent)


@cute.jit
def _issue(
    copies: cutlass.Constexpr,
    firsts: tuple[Any, ...],
    extents: tuple[Any, ...],
    columns: cutlass.Constexpr,
    src_idx: Any,
    dst_idx: Any,
) -> None:
    """One stage of shared memory to every range that holds its first column."""
    for k in cutlass.range_constexpr(len(copies)):
        if holds(firsts[k] + dst_idx[1] * columns, extents[k]):
            copies[k](src_idx=src_idx, dst_idx=dst_idx)


def within(column: Any, bounds: tuple[int, int]) -> Any:
    """Whether a column lies from the first bound on, before the second."""
    return (column >= bounds[0]) & (column < bounds[1])


class Range(EpiOp):
    """The tensor of a further range of a ``RangeStore``'s tile."""

    host_arg_key = TileStore.host_arg_key

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        return _fake(key, fctx)

    def param_fields(self) -> list[tuple[str, Any, Any]]:
        return [(f"tma_atom_{self.name}", object, None), (self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        # QuACK gives stores a batch of one, and takes a tensor without for the rows of several problems.
        batched = layout_utils.expand(getattr(args, self.name), 2, 1)
        atom, tensor, _, _ = setup_epi_tensor(gemm, batched)
        return {f"tma_atom_{self.name}": atom, self.name: tensor}

    def tma_atoms(self, gemm: Any, params: Any) -> list[Any]:
        return [getattr(params, f"tma_atom_{self.name}")]


class RangeStore(TileStore):
    """A tile of which ranges of columns are stored, in this tensor and in those of ``others``.

    All are written from one stage of shared memory. A range begins where a stage does, and ends anywhere.
    """

    def __init__(self, name: str, *others: str):
        super().__init__(name)
        self.names = (name, *others)

    def config_key(self) -> tuple[Any, ...]:
        return (*super().config_key(), self.names)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        return _fake(key, fctx)

    def store_setup(
        self,
        gemm: Any,
        params: Any,
        smem: Any,
        tiled_copy_r2s: Any,
        tiled_copy_t2r: Any,
        tile: Any,
        varlen: Any,
        thread: Any,
    ) -> tuple[Any, ...]:
        copy_r2s, staged, _, _ = super().store_setup(
            gemm, params, smem, tiled_copy_r2s, tiled_copy_t2r, tile, varlen, thread
        )
        shape, epi_tile = gemm.cta_tile_shape_mnk[:2], getattr(params, self._epi_tile_key())
        columns = cute.size(epi_tile, mode=[1])
        copies, firsts, extents = [], [], []
        for name in self.names:
            first, tensor = dict(gemm.range_starts)[name], getattr(params, name)
            if first % columns:
                raise ValueError(f"a range begins at column {first}, inside a stage of {columns}")
            shifted = cute.domain_offset((0, -first), varlen.offset_batch_epi(tensor, tile[3]))
            copy, _, _ = gemm.epilog_gmem_copy_and_partition(
                getattr(params, f"tma_atom_{name}"), shifted, shape, epi_tile, smem, tile
            )
            copies.append(copy)
            firsts.append(tile[1] * shape[1] - first)
            extents.append(cute.size(tensor, mode=[1]))
        issue = partial(_issue, tuple(copies), tuple(firsts), tuple(extents), columns)
        return copy_r2s, staged, issue, None
