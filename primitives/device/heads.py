"""Statistics of heads: sums over a part of a row that one CTA tile holds."""

from __future__ import annotations

from typing import Any

from quack.epilogue.ops import GroupedColStatsBase

from primitives.device.mainloop import resource

__all__ = ["HeadSums", "at_subtile", "statistic"]


class HeadSums(GroupedColStatsBase):
    """Sums over each head of a row, in registers: its argument is the width of heads."""

    baked = True  # the width is a number in the compiled kernel

    def stat_value(self, total: Any, group_cols: Any) -> Any:
        return total


def at_subtile(gemm: Any, name: str, states: Any, at: Any) -> Any:
    """A resource's values for a subtile, outside the epilogue's own loop."""
    return resource(gemm, name).begin_loop(gemm, states[name], at)


def statistic(gemm: Any, name: str, state: Any) -> Any:
    """Statistics of heads as a fragment like the accumulator's."""
    return resource(gemm, name).fn_prepare(gemm, state, False)
