"""Stretched inputs: values beyond the typical ones (``init``), up to all values that the domain allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coda_agent.verifier.spec.init import IGNORED_SHARE, Init

# Typical values are scaled by a power of two. REACH gives the largest exponent, by dtype. Products of several
# scaled inputs, and the squares of such products, stay within fp32. The exponent for fp8 is small, because
# fp8 itself has little range.
REACH = {"fp16": 6.0, "fp8_e4m3": 3.0}
USUAL_REACH = 16.0
# The largest exponent for one input if all other inputs are typical. This input's products with other inputs
# still fit in fp32, and a later factor in the program may bring the products back to a usual size.
FAR = 60.0
# the family "ends" replaces this fraction of a tensor's values by zero (if legal), and the same fraction by
# each end of the domain and of the typical values
ZEROS = 1 / 16
NEAR = 2.0**24  # an end of the domain beyond this magnitude is not used as a value
# In the family "ends", a scalar has 2 to 6 possible values: its scaled value, zero, and the ends of the
# domain and of its typical values. Over this many consecutive seeds, the scalar takes each of these values
# equally often.
TURNS = 60


class Typical(NamedTuple):
    """One input's typical values before the cast, and the bounds of its domain. ``own`` is the generator for
    the input's further random numbers; ``seed`` is the seed of all inputs."""

    values: Tensor
    init: Init
    dtype: str
    low: float
    high: float
    own: torch.Generator
    seed: int

    @property
    def reach(self) -> float:
        return REACH.get(self.dtype, USUAL_REACH)


def _faint(of: Typical) -> Tensor:
    """Scale floats down by one factor; draw integers near the low end of the domain."""
    if _integral(of):
        return of.low + of.values.double().remainder(8)
    return of.values * 2.0 ** -_within(of, 1.0, of.reach)


def _loud(of: Typical) -> Tensor:
    """Scale floats up by one factor; draw integers near the high end of the domain."""
    if _integral(of):
        return of.high - of.values.double().remainder(8)
    return of.values * 2.0 ** _within(of, 1.0, of.reach)


def _mixed(of: Typical) -> Tensor:
    """Scale floats by one factor, larger or smaller than 1, with either sign. Draw integers over the whole
    domain; if ``init`` is ``count``, count from a random start instead."""
    if _integral(of):
        if of.init.count is not None:
            return of.values.double() + math.floor(_within(of, of.low, of.high))
        return _uniform(of, of.low, of.high + 1).floor()
    sign = 1.0 if _within(of, -1.0, 1.0) > 0 else -1.0
    return of.values * sign * 2.0 ** _within(of, -of.reach, of.reach)


def _ends(of: Typical) -> Tensor:
    """Scale each value of a vector, and each row of a matrix, by its own factor. Replace some values by an
    end of the domain or of the typical values, or by zero. A scalar has only one value, so consecutive seeds
    take turns: an end, zero, the scaled value. Draw integers at small and large distances from the low end,
    and some at an end."""
    if _integral(of):
        span = max(of.high - of.low, 1.0)
        anywhere = of.low + span ** _uniform(of, 0.0, 1.0) - 1
        return _some(
            of, 1 / 8, torch.tensor(of.high), _some(of, 1 / 8, torch.tensor(of.low), anywhere.round())
        )
    shape = of.values.shape[:1] if of.values.dim() > 1 else of.values.shape
    spread = of.reach if of.values.dim() < 2 else of.reach / 4
    factors = torch.exp2(_drawn(of, shape, -spread, spread)) * _drawn(of, shape, -1.0, 1.0).sign()
    values = of.values * factors.reshape([*shape, *[1] * (of.values.dim() - len(shape))])
    every = dict.fromkeys((of.low, of.high, 0.0, *(of.init.uniform or ())))
    ends = [end for end in every if abs(end) <= NEAR and of.low <= end <= of.high]
    if not shape:
        turn = of.seed % (len(ends) + 1)
        return torch.full_like(values, ends[turn]) if turn < len(ends) else values
    for end in ends:
        values = _some(of, ZEROS, torch.tensor(end, dtype=values.dtype), values)
    return values


STRETCHED: dict[str, Callable[[Typical], Tensor]] = {
    "faint": _faint,
    "loud": _loud,
    "mixed": _mixed,
    "ends": _ends,
}
SEARCHED = "searched"  # inputs that ``verifier.numerics.search`` found
LANDMARKS = "landmarks"  # inputs of ``verifier.numerics.landmarks``
DEPENDENT = "dependent"  # inputs of ``verifier.numerics.dependent``
BEYOND = (*STRETCHED, SEARCHED, LANDMARKS, DEPENDENT)  # families of inputs beyond the typical ones


def stretched(of: Typical, family: str) -> Tensor:
    """Draw the values of a stretched family, and move them into the domain (``legal``)."""
    return legal(of, STRETCHED[family](of))


def legal(of: Typical, values: Tensor) -> Tensor:
    """Move values into the domain: adjust their signs first, then their magnitudes. If ``init`` has an
    ``ignored`` value (such as -100 for targets), replace a fixed share of the values by it."""
    if of.low >= 0 and not _integral(of):
        values = values.abs()
    values = values.clamp(of.low, of.high)
    if of.init.ignored is None:
        return values
    return _some(of, IGNORED_SHARE, torch.tensor(float(of.init.ignored)), values)


def _integral(of: Typical) -> bool:
    return of.dtype.startswith("int")


def far(of: Typical) -> Tensor:
    """Scale all values up or down by one factor, but only so far that products with other inputs stay within
    fp32."""
    return _mixed(of) if _integral(of) else of.values * 2.0 ** _within(of, -FAR, FAR)


def near(of: Typical, numbers: Sequence[float]) -> Tensor:
    """Draw each value at one of these numbers or next to it, with either sign."""
    chosen = torch.tensor(numbers, dtype=torch.float64)
    at = torch.randint(len(numbers), of.values.shape, generator=of.own, device=of.own.device)
    sign = _uniform(of, -1.0, 1.0).sign()
    if _integral(of):
        return (chosen[at] * sign).round() + _uniform(of, -1.5, 1.5).round()
    return chosen[at] * sign * (1 + _uniform(of, -1.5, 1.5).round() * 2.0**-8)


def _within(of: Typical, low: float, high: float) -> float:
    return float(_drawn(of, (), low, high))


def _uniform(of: Typical, low: float, high: float) -> Tensor:
    return _drawn(of, of.values.shape, low, high).double()


def _drawn(of: Typical, shape: Sequence[int], low: float, high: float) -> Tensor:
    made = torch.empty(shape, device=of.own.device, dtype=torch.float64)
    return made.uniform_(low, high, generator=of.own).to(torch.float64 if _integral(of) else torch.float32)


def _some(of: Typical, share: float, value: Tensor, values: Tensor) -> Tensor:
    """Replace a random ``share`` of ``values`` by ``value``."""
    chosen = _drawn(of, values.shape, 0.0, 1.0) < share
    return torch.where(chosen, value.to(values.device, values.dtype), values)
