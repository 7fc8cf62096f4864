"""Largest magnitudes of blocks of a row that one CTA tile holds whole: scales for fp8."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from primitives.device.heads import HeadSums

__all__ = ["HeadAbsMax"]


class HeadAbsMax(HeadSums):
    """The largest magnitude of each head of a row, in registers. Columns past the edge are zero, as the
    identity is."""

    def _combine_op(self) -> Any:
        return lambda a, b: cute.arch.fmax(a, cute.arch.fmax(b, -b))

    def _fold_identity(self) -> float:
        return 0.0
