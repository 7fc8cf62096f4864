"""Vectors and tables that every head of a row reads again, as rotary embeddings do."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import EpiSmemBytes
from quack.epilogue.rotary import RotaryCosSinTMALoad

from primitives.device.lanes import Memory, repeated, row
from primitives.device.mainloop import FusedGemm

__all__ = ["HeadTable", "TableGemm", "table", "tabled", "wrapped"]

SUBTILE = 32  # columns of the epilogue's stages


def streams(argument: cute.Tensor) -> bool:
    """Whether a head is a whole number of stages."""
    return argument.shape[1] % SUBTILE == 0


class HeadTable(RotaryCosSinTMALoad):
    """A tile [M, width of a head], brought by TMA stage by stage, for each head from the same place."""

    def smem_bytes(self, arg_tensor: Any, *shapes: Any) -> Any:
        return super().smem_bytes(arg_tensor, *shapes) if streams(arg_tensor) else EpiSmemBytes()

    def settled(self, args: Any) -> Any:
        return self if streams(getattr(args, self.name)) else AddressedTable(self.name)


class AddressedTable(Memory):
    """A table that threads address. QuACK gives every tile a batch of one."""

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)[None, None, 0]}


class TableGemm(FusedGemm):
    """Base of a step that reads tables."""

    def _filter_epi_ops(self, args: Any) -> None:
        super()._filter_epi_ops(args)
        self._epi_ops = tuple(op.settled(args) if isinstance(op, HeadTable) else op for op in self._epi_ops)


def table(source: cute.Tensor) -> cute.Tensor:
    """A table's stage as fp32 in registers, or where it lies in memory."""
    return source.to(Float32) if source.memspace == cute.AddressSpace.rmem else source


def tabled(place: Any, source: cute.Tensor, lane: Any, twice: Any, past: Any, width: int) -> Any:
    """A table's value over a lane."""
    if source.memspace == cute.AddressSpace.rmem:
        return source[lane]
    return repeated(place, source, lane, twice, past, width)


def wrapped(place: Any, source: cute.Tensor, lane: Any, twice: Any, past: Any, width: int, tile: int) -> Any:
    """A value that is the same for each head, in a tile of so many columns, which may begin inside one."""
    if tile % width == 0:
        return repeated(place, source, lane, twice, past, width)
    # A head's width is a multiple of the columns that a thread has two of: within these nothing wraps around.
    offset = (place.column - place.thread + cute.crd2idx(lane, place.columns)) % width
    offset += place.tile_column % width
    at = place.thread + cutlass.select_(offset < width, offset, offset - width)
    at = at // 2 if twice < 0 else at
    if cute.rank(source) == 1:
        return source[at].to(Float32)
    return source[cutlass.min(row(place, lane), source.shape[0] - 1), at].to(Float32)
