"""Between steps: partials of reductions become vectors, in a fixed order."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from primitives.device.values import LOWEST, choose, largest

__all__ = [
    "BLOCK",
    "LANES",
    "finish_column",
    "finish_logsumexp",
    "finish_row",
    "finish_select",
]

LANES = 8  # threads that finish one value together
BLOCK = 256


def _combined(how: str, a: Any, b: Any) -> Any:
    return a + b if how == "add" else largest(a, b)


@cute.jit
def _across(value: Float32, how: cutlass.Constexpr) -> Float32:
    """One value of ``LANES`` lanes'."""
    for step in cutlass.range_constexpr(3):
        value = _combined(how, value, cute.arch.shuffle_sync_bfly(value, offset=LANES >> (step + 1)))
    return value


@cute.jit
def finish_row(partials: cute.Tensor, at: Any, lane: Any, how: cutlass.Constexpr) -> Float32:
    """A row's value from its partials [1, M, tiles], in a fixed order. Magnitudes are no less than 0."""
    value = Float32(LOWEST if how == "max" else 0.0)
    for tile in cutlass.range(lane, partials.shape[2], LANES):
        value = _combined(how, value, partials[0, at, tile])
    return _across(value, how)


@cute.jit
def finish_column(
    parts: tuple[cute.Tensor, ...], at: Any, lane: Any, how: cutlass.Constexpr, half: cutlass.Constexpr
) -> Float32:
    """A column's value from its partials [1, tiles, N]; of two parts, one has the even columns."""
    source = parts[0]
    value = Float32(LOWEST if how == "max" else 0.0)
    if const_expr(len(parts) == 2):
        for tile in cutlass.range(lane, source.shape[1], LANES):
            even, odd = parts[0][0, tile, at // 2], parts[1][0, tile, at // 2]
            value = _combined(how, value, Float32(cutlass.select_(at % 2 == 0, even, odd)))
    else:
        place = at * 2 if const_expr(half) else at
        for tile in cutlass.range(lane, source.shape[1], LANES):
            value = _combined(how, value, source[0, tile, place])
    return _across(value, how)


@cute.jit
def finish_logsumexp(partials: cute.Tensor, at: Any, lane: Any) -> Float32:
    """The log-sum-exp of a row's partial ones: their largest first, then one sum."""
    highest = finish_row(partials, at, lane, "max")
    # A row of -inf has no largest to subtract; its log-sum-exp is -inf.
    base = choose(highest == LOWEST, 0.0, highest)
    total = Float32(0.0)
    for tile in cutlass.range(lane, partials.shape[2], LANES):
        total += cute.math.exp(partials[0, at, tile] - base, fastmath=True)
    return cute.math.log(_across(total, "add")) + base


@cute.jit
def finish_select(selected: cute.Tensor, at: Any, index: Float32, extent: Float32) -> Float32:
    """What was selected for a row, or 0 where its index is out of range and nothing was written."""
    found = selected[at]
    cute.arch.sync_warp()
    return choose(index >= 0.0, choose(index < extent, found, 0.0), 0.0)
