"""The error gate's limits, by family of inputs.

Three users need the limits: the numerics and benchmark gates on a GPU (``checks``), the interpret gate
(``cpu_numerics``), and the search for mutants that pass these gates (``mutation_score.weak_spots``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from coda_agent.verifier.numerics.stretch import BEYOND


@dataclass(frozen=True)
class ErrorLimits:
    """The error gate's limits for an output. ``rms``, ``tile`` and ``element`` limit the output's errors,
    divided by the errors of the yardstick (the reference in fp32). ``slope`` limits how far from 1 the slope
    of the output's regression on the truth may be. An fp32 output has the limits ``fp32_rms``, ``fp32_tile``
    and ``fp32_element``, and no limit on the slope."""

    rms: float = 1.25
    tile: float = 1.5
    element: float = 2.0
    slope: float = 2e-4
    fp32_rms: float = 4.0
    fp32_tile: float = 6.0
    fp32_element: float = 8.0
    deviations: float = 4.0  # slack for statistics over few elements, in standard deviations
    shared: tuple[float, float, float] | None = None  # limits for fp32 outputs if the yardstick is coarse
    # limit on a single value's error, divided by the yardstick's worst error among values of at most about
    # the same size
    values: float | None = None
    loud: bool = False  # whether values in large rows and columns may have proportionally larger errors
    effective: bool = False  # whether to count only the elements that determine the yardstick's error

    def ratios(self, dtype: str) -> tuple[float, float, float]:
        """The limits (RMS, worst tile, worst element) for an output of this dtype."""
        if dtype == "fp32":
            return self.fp32_rms, self.fp32_tile, self.fp32_element
        return self.rms, self.tile, self.element


def of_stored(family: str, long: bool = False) -> ErrorLimits:
    """Limits for outputs in their own dtypes. ``long``: one extent is long, and all others are short."""
    if family in BEYOND:
        return FAR
    if family == "spikes":
        return SPIKES
    return FEW if long or family == "repeated" else USUAL


def of_unrounded(family: str, long: bool = False) -> ErrorLimits:
    """Limits for outputs that are left in fp32 although the spec declares 16 bits."""
    if family in BEYOND:
        return FAR_UNROUNDED
    if family in EXTREME:
        return VALUES
    if family == "spikes":
        return FEW_UNROUNDED
    return LONG_UNROUNDED if long or family == "repeated" else UNROUNDED


USUAL = ErrorLimits()
# Limits for outputs left in fp32. A correct program with another order of operations has a few times the
# reference's error; a program with wrong mathematics has a far larger error. If a matmul reads the rounded
# result of another matmul, this rounding causes nearly the whole error of every program. Then ``shared``
# applies.
UNROUNDED = ErrorLimits(fp32_rms=16.0, fp32_tile=24.0, fp32_element=32.0, shared=(2.0, 3.0, 4.0), values=16.0)
# Families in which exponentials make a few values of an output larger than all others together. A ratio of
# two RMS errors would depend only on these few values, and say nothing about all others. So each value is
# judged alone.
EXTREME = ("large", "huge", "negative")
VALUES = ErrorLimits(fp32_rms=math.inf, fp32_tile=math.inf, fp32_element=math.inf, values=UNROUNDED.values)
# Limits for sizes with one long extent, where all other extents are short. A few operands, with their
# rounding errors, repeat along the long extent. So an output has few independent errors, and ratios and
# slopes vary widely by chance. Errors from fp32 arithmetic alone have the usual limits.
FEW = ErrorLimits(rms=2.5, tile=3.0, element=4.0, slope=4e-3)
FEW_UNROUNDED = replace(UNROUNDED, shared=(4.0, 6.0, 8.0))
# In sums of few products, some rows and columns are large by chance. Values that cancel in such a row or
# column have larger errors too; ``loud`` allows these errors. ``loud`` compares a row's size with the usual
# size of all values. In a family that makes rows large by design, these rows also raise the usual size, so
# ``loud`` hardly widens the limits.
LONG_UNROUNDED = replace(FEW_UNROUNDED, loud=True)
# If one value of a row outweighs all others, only a few elements can have the largest error. The largest of
# few errors varies widely by chance, so the limit on it is wide. A wrong clamp still fails, because its error
# is thousands of times a rounding error.
SPIKES = replace(FEW, element=16.0, fp32_element=32.0)
# Far from typical inputs, one input may outweigh all others, and a few values may cause nearly all errors.
# Then the statistics count only the few values with these errors (``effective``). There are no limits for
# tiles, because they would add nothing.
FAR = replace(FEW, tile=math.inf, fp32_tile=math.inf, effective=True)
FAR_UNROUNDED = replace(LONG_UNROUNDED, fp32_tile=math.inf, shared=(4.0, math.inf, 8.0), effective=True)
