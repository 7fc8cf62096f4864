"""Sums over the errors of an output, and over the errors of the yardstick (the reference in fp32). The error
gate decides from these sums."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coda_agent.verifier.numerics.exactness import rows_at_once
from coda_agent.verifier.numerics.sizes import TILE

# half an fp32 ulp, relative to the truth's RMS; a smaller yardstick error counts as this much
FLOOR = 2.0**-24
# a yardstick error above this fraction of the truth's RMS comes from 16-bit roundings, not from fp32
# arithmetic
COARSE = 2.0**-14


@dataclass
class ErrorSums:
    """Sums over the elements of one output. In the names of the fields, g is the output, t the truth, e the
    output's error, and r the yardstick's error. For example, ``r2t2`` is the sum of r^2 * t^2."""

    count: int
    e2: float = 0.0
    r2: float = 0.0
    t2: float = 0.0
    g2: float = 0.0
    gt: float = 0.0
    rt: float = 0.0
    r2t2: float = 0.0
    r4: float = 0.0
    e_max: float = 0.0
    r_max: float = 0.0
    wrong: int = 0
    first_wrong: tuple[int, int] = (0, 0)
    zeros: int = 0

    @property
    def floor(self) -> float:
        return max(FLOOR * math.sqrt(self.t2 / self.count), 2.0**-149)

    @property
    def effective(self) -> float:
        """How many elements determine the yardstick's error: ``count`` if all errors are equally large, fewer
        if a few errors dominate."""
        return min(self.r2**2 / self.r4, self.count) if self.r4 else self.count

    @property
    def coarse(self) -> bool:
        """Whether the yardstick's error is large enough to come from 16-bit operands."""
        return self.r2 > COARSE**2 * self.t2

    @property
    def slope(self) -> float:
        return self.gt / self.t2 if self.t2 else 1.0

    @property
    def slope_off(self) -> float:
        """The distance from the slope of the output's regression on the truth to 1 or to the yardstick's
        slope, whichever is nearer. If values repeat along an axis, their rounding errors repeat too, so even
        the yardstick's slope may differ from 1."""
        return min(abs(self.slope - 1), abs(self.slope - 1 - self.rt / self.t2)) if self.t2 else 0.0

    @property
    def slope_error(self) -> float:
        """The slope's standard error, computed from the yardstick's errors."""
        return math.sqrt(self.r2t2) / self.t2 if self.t2 else 0.0

    def ratio(self, error: float, yard: float) -> float:
        return error / max(yard, self.floor)


@dataclass
class TileSums:
    """For each 128x128 tile, the sums of squared errors and the number of elements."""

    e2: Tensor
    r2: Tensor
    count: Tensor


def measure(got: Tensor, truth: Tensor, yard: Tensor, dtype: torch.dtype) -> tuple[ErrorSums, TileSums]:
    """Compute the sums over an output [R, C] and over its tiles. ``dtype`` is the output's dtype. An element
    is left out if its truth is outside the dtype's range."""
    stats = ErrorSums(count=truth.numel())
    rows = rows_at_once(truth)
    parts = [
        _accumulate(stats, i, got[i : i + rows], truth[i : i + rows], yard[i : i + rows], dtype)
        for i in range(0, truth.shape[0], rows)
    ]
    e2, r2, count = (torch.cat(column) for column in zip(*parts, strict=True))
    return stats, TileSums(e2, r2, count)


def worst_place(got: Tensor, truth: Tensor, e_max: float) -> tuple[int, int]:
    """The row and column of the error that ``measure`` found to be the largest."""
    rows = rows_at_once(truth)
    for start in range(0, truth.shape[0], rows):
        e = got[start : start + rows].double() - truth[start : start + rows]
        if (found := e.abs() == e_max).any():
            row, column = divmod(int(found.flatten().int().argmax()), truth.shape[1])
            return start + row, column
    raise AssertionError(f"no error is {e_max}")


def _accumulate(
    stats: ErrorSums, start: int, got: Tensor, truth: Tensor, yard: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one block of rows to ``stats``. For each tile of the block, return the sum of e^2, the sum of r^2
    and the number of elements."""
    t, g, y = (values.double() for values in (truth, got, yard))
    e, r = g - t, y - t
    largest = [_largest(values) for values in (t, e, r)]
    # fp8 saturates, so every finite value fits
    most = math.inf if dtype.itemsize == 1 else torch.finfo(dtype).max
    if not all(map(math.isfinite, largest)) or largest[0] > most:
        rounded = truth if dtype.itemsize == 1 else truth.to(dtype)
        usable = _usable(stats, start, rounded.isfinite(), g, t, y)
        t, g, e, r = (values.where(usable, 0.0) for values in (t, g, e, r))
        largest = [_largest(values) for values in (t, e, r)]
    if g.count_nonzero() < g.numel():
        stats.zeros += int(((g == 0) & (t != 0)).sum())
    stats.e_max, stats.r_max = max(stats.e_max, largest[1]), max(stats.r_max, largest[2])
    stats.g2 += _dot(g, g)
    stats.gt += _dot(g, t)
    stats.t2 += _dot(t, t)
    rt = r * t
    stats.rt += float(rt.sum())
    stats.r2t2 += _dot(rt, rt)
    e2, r2 = e.square_(), r.square_()
    stats.r4 += _dot(r2, r2)
    tiles = _tile_sums(e2), _tile_sums(r2), _tile_counts(e2.shape, e2.device)
    stats.e2 += float(tiles[0].sum())
    stats.r2 += float(tiles[1].sum())
    return tiles


def _largest(values: Tensor) -> float:
    """The largest magnitude, or NaN if any value is NaN."""
    low, high = map(float, values.aminmax())
    return max(-low, high)  # NaN in ``values`` makes ``low`` and ``high`` NaN


def _dot(a: Tensor, b: Tensor) -> float:
    return float(a.reshape(-1).dot(b.reshape(-1)))


def _usable(stats: ErrorSums, start: int, holds: Tensor, got: Tensor, t: Tensor, yard: Tensor) -> Tensor:
    """Return a mask of the positions where values can be compared, and count wrong values in ``stats``.
    ``holds`` marks the positions where the dtype can represent the truth. At other positions a kernel may
    overflow, so its values are not compared."""
    ok, known = got.isfinite(), yard.isfinite()
    same_infinity = (got == t) | (got.isnan() & t.isnan())
    lost, excused = holds & ~ok, holds & ~known
    wrong = ~t.isfinite() & ~same_infinity | lost & (lost.sum(1) > excused.sum(1))[:, None]
    if count := int(wrong.sum()):
        if not stats.wrong:
            row, column = divmod(int(wrong.flatten().int().argmax()), t.shape[1])
            stats.first_wrong = (start + row, column)
        stats.wrong += count
    return holds & ok & known


def _tile_sums(values: Tensor) -> Tensor:
    """[R, C] -> sums over 128x128 tiles, including incomplete tiles at the edges."""
    if max(values.shape) <= TILE:
        return values.sum().double().reshape(1, 1)
    return _strip_sums(_strip_sums(values).mT).mT.double()


def _strip_sums(values: Tensor) -> Tensor:
    """[R, C] -> [ceil(R / 128), C]: sums over strips of 128 rows; the last strip may have fewer rows."""
    whole, rest = values.tensor_split([len(values) // TILE * TILE])
    sums = whole.unflatten(0, (-1, TILE)).sum(1)
    return torch.cat((sums, rest.sum(0, keepdim=True))) if len(rest) else sums


@functools.lru_cache(maxsize=256)
def _tile_counts(shape: torch.Size, device: torch.device) -> Tensor:
    """The number of elements in each tile of ``_tile_sums``, fp64."""
    rows, columns = (
        torch.tensor([min(TILE, n - i) for i in range(0, n, TILE)], dtype=torch.float64) for n in shape
    )
    return torch.outer(rows, columns).to(device)
