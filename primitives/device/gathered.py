"""A GEMM of rows sorted by expert that gathers its A: QuACK's ``gather_A``, whose threads copy rows by
cp.async.

QuACK reads whatever row an index names. This module clamps each row number to A's rows, so that no index
reads outside memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from quack.copy_utils import gather_m_get_copy_fn

from primitives.device.grouped import WARP, GroupedGemm

__all__ = ["GatheredGemm"]


class Within:
    """A tile's part of the index. A row number outside A becomes A's nearest."""

    def __init__(self, index: Any, rows: Any):
        self.index, self.rows = index, rows

    def __getitem__(self, row: Any) -> Any:
        return cutlass.min(cutlass.max(self.index[row], 0), self.rows - 1)


class GatheredGemm(GroupedGemm):
    """Base of a step with offsets and an index: row i of the product is of A's row index[i]."""

    @cute.jit
    def _make_gather_A_copy(self, a: Any, smem: Any, varlen: Any, tile: Any, expert: Any) -> Any:
        rows = self.cta_tile_shape_mnk[0]
        index = cute.local_tile(varlen.offset_batch_AIdx(expert), (rows,), (tile[0],))
        copy = self._make_gmem_tiled_copy_A(a.element_type, self.a_layout, self.num_ab_load_warps * WARP)
        own = copy.get_slice(cute.arch.thread_idx()[0] - WARP * self.ab_load_warp_id)
        left, inner = varlen.len_m(expert) - tile[0] * rows, varlen.len_k(expert)
        return gather_m_get_copy_fn(own, a, smem, Within(index, a.shape[0]), left, inner), None
