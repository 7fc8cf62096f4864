"""Ratios of interleaved samples, with confidence intervals.

Both arms of a round run at the same clock rate and temperature, so drift cancels in the round's ratio. The
reported ratio is the median of the rounds' ratios. A ratio of two medians would include drift, because each
median could come from a round with another clock rate. Differences between processes (addresses, other load)
are invisible within one process, so ``across`` combines the ratios of several processes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Any

MIN_ROUNDS = 8
RESAMPLES = 2000
CONFIDENCE = 0.95  # the confidence of every interval
POWER = 0.8  # a difference counts as detectable if a measurement finds it with this probability
# Student's interval drops this fraction of the rounds at each end of the sorted ratios, so that a few delays
# of the host do not decide the result. Yuen also chose 0.2.
TRIM = 0.2


@dataclass(frozen=True)
class Interval:
    """A ratio with its two-sided confidence interval, from ``low`` to ``high``. This interval is the union of
    the intervals of two methods, ``bootstrap`` and ``student``."""

    estimate: float
    low: float
    high: float
    confidence: float
    bootstrap: tuple[float, float]
    student: tuple[float, float]

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Interval:
    """The median of a[i] / b[i] over all rounds i, with its interval. The samples ``a`` and ``b`` have the
    same unit.

    If ``a`` is a baseline's time and ``b`` a candidate's, the median is the speedup, and ``low`` is the
    speedup that may be claimed. The interval is the union of two intervals: the percentiles of a bootstrap,
    which resamples rounds, and Student's t on trimmed log ratios (Yuen 1974). Raises ValueError for unpaired,
    too few or non-positive samples.
    """
    logs = _logs(a, b)
    return _union(median(logs), _bootstrap((tuple(logs),), seed), _student(logs))


def across(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0) -> Interval:
    """The geometric mean of several processes' ratios. Each pair has the samples of both arms in one process.

    The interval is the union of two intervals: Student's t on the processes' log ratios, and the percentiles
    of a bootstrap, which resamples processes and then the rounds of each process. Raises ValueError in the
    same cases as ``ratio``, and for fewer than two processes.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} process(es) do not show how processes spread; measure in at least 2")
    rows = [_logs(a, b) for a, b in pairs]
    logs = [median(row) for row in rows]
    centre, error = fmean(logs), stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(CONFIDENCE, len(logs) - 1) * error
    student = math.exp(centre - reach), math.exp(centre + reach)
    return _union(centre, _bootstrap(tuple(map(tuple, rows)), seed), student)


def _union(centre: float, bootstrap: tuple[float, float], student: tuple[float, float]) -> Interval:
    lows, highs = zip(bootstrap, student, strict=True)
    return Interval(math.exp(centre), min(lows), max(highs), CONFIDENCE, bootstrap, student)


def of_pairs(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """``across`` several processes, or the ``ratio`` of a single one, over its rounds."""
    return across(pairs) if len(pairs) > 1 else ratio(*pairs[0])


def product(ratios: Sequence[Interval], power: float = 1.0) -> Interval:
    """The product of independent ratios, raised to a power: a / c from a / b and b / c, or, with the power 1
    / n, the geometric mean of n ratios. In logarithms, the squared half-widths of independent ratios add
    up."""
    estimate = math.prod(r.estimate for r in ratios) ** power

    def ends(side: Callable[[Interval], tuple[float, float]]) -> tuple[float, float]:
        low, high = (
            power * math.hypot(*(math.log(side(r)[end] / r.estimate) for r in ratios)) for end in (0, 1)
        )
        return estimate * math.exp(-low), estimate * math.exp(high)

    bootstrap, student = ends(lambda r: r.bootstrap), ends(lambda r: r.student)
    return Interval(estimate, *ends(lambda r: (r.low, r.high)), ratios[0].confidence, bootstrap, student)


def detectable(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The smallest relative difference that a measurement like ``pairs`` detects with a power of 80 %."""
    logs = [median(_logs(a, b)) for a, b in pairs]
    freedom = len(logs) - 1
    quantiles = student_quantile(CONFIDENCE, freedom) + student_quantile(2 * POWER - 1, freedom)
    return math.expm1(quantiles * stdev(logs) / math.sqrt(len(logs)))


def _logs(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The logarithms of the rounds' ratios."""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} samples: a ratio pairs rounds, measure both arms together")
    if len(a) < MIN_ROUNDS:
        raise ValueError(f"{len(a)} rounds are too few for an interval; measure at least {MIN_ROUNDS}")
    wrong = [x for x in (*a, *b) if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise ValueError(f"a sample of {wrong[0]} s is not a duration; samples are finite and positive")
    return [math.log(x / y) for x, y in zip(a, b, strict=True)]


@lru_cache(1024)  # reports, tables and audits ask for the same ratios again
def _bootstrap(rows: tuple[tuple[float, ...], ...], seed: int) -> tuple[float, float]:
    """The bootstrap's percentile interval: resample processes, resample the rounds of each process, and take
    the mean of the processes' medians."""
    rounds = {len(row) for row in rows}
    means = sorted(_equal_draws(rows, seed) if len(rounds) == 1 else _draws(rows, seed))
    tail = (1 - CONFIDENCE) / 2
    low, high = means[math.floor(tail * RESAMPLES)], means[math.ceil((1 - tail) * RESAMPLES) - 1]
    return math.exp(low), math.exp(high)


def _draws(rows: Sequence[Sequence[float]], seed: int) -> list[float]:
    """Draw RESAMPLES bootstrap samples, and return the mean of each sample (see ``_bootstrap``)."""
    draw = random.Random(seed)
    return [
        fmean(median(draw.choices(row, k=len(row))) for row in draw.choices(rows, k=len(rows)))
        for _ in range(RESAMPLES)
    ]


def _equal_draws(rows: Sequence[Sequence[float]], seed: int) -> list[float]:
    """Return the same numbers as ``_draws``, several times as fast; all rows must have the same length.
    NumPy's Mersenne Twister starts in the state of Python's, and so draws the same random numbers."""
    import numpy as np  # imported here, because half of this module's users need no bootstrap

    _, (*state, position), _ = random.Random(seed).getstate()
    twister = np.random.RandomState()
    twister.set_state(("MT19937", np.array(state, dtype=np.uint32), position, 0, 0.0))
    processes, rounds = len(rows), len(rows[0])
    drawn = twister.random_sample((RESAMPLES, processes * (1 + rounds)))
    process = (drawn[:, :processes] * processes).astype(int)
    place = (drawn[:, processes:] * rounds).astype(int).reshape(RESAMPLES, processes, rounds)
    medians = np.median(np.array(rows)[process[:, :, None], place], axis=2)
    return [fmean(each) for each in medians.tolist()]


def _student(logs: Sequence[float]) -> tuple[float, float]:
    logs = sorted(logs)
    n, cut = len(logs), int(TRIM * len(logs))
    kept = logs[cut : n - cut]
    centre = fmean(kept)
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    spread = math.sqrt(sum((x - fmean(winsorised)) ** 2 for x in winsorised) / (n - 1))
    error = spread * n / (len(kept) * math.sqrt(n))
    reach = student_quantile(CONFIDENCE, len(kept) - 1) * error
    return math.exp(centre - reach), math.exp(centre + reach)


@lru_cache(256)
def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| <= t) = confidence for ``freedom`` degrees of freedom (0.95, 29 -> 2.0452)."""
    low, high = 0.0, math.pi / 2  # search for the angle atan(t / sqrt(freedom)), which is bounded, unlike t
    while high - low > 1e-13:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_mass(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) * tan(angle)), by the finite series of Abramowitz and Stegun 26.7.3-4."""
    odd = freedom % 2
    square = math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series
