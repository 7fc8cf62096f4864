"""Ratios of interleaved samples with confidence intervals. Standard library only.

Both arms of a round meet the same clocks and temperature, so rounds are compared in pairs: what
drifts with the machine cancels, and what is left is the kernels' difference and noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

MIN_ROUNDS = 8
RESAMPLES = 2000
TRIM = 0.2  # of the rounds, at each end (Yuen's choice): a few host hiccups must not decide


@dataclass(frozen=True)
class Interval:
    """A ratio with its two-sided confidence interval: ``low`` and ``high`` enclose both methods'."""

    estimate: float
    low: float
    high: float
    confidence: float
    bootstrap: tuple[float, float]
    student: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio(a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """median(a) / median(b) of paired samples, a[i] and b[i] from round i, in the same unit.

    With ``a`` a baseline's seconds and ``b`` a candidate's it is the speedup, and ``low`` what one may
    claim. The bootstrap resamples rounds (percentile interval of the ratio of medians); the cross-check
    is Student's t on trimmed log ratios (Yuen 1974). Raises ValueError for unpaired, too few or
    non-positive samples.
    """
    _check(a, b, confidence)
    bootstrap = _bootstrap(a, b, confidence, seed)
    student = _student(a, b, confidence)
    return Interval(
        estimate=median(a) / median(b),
        low=min(bootstrap[0], student[0]),
        high=max(bootstrap[1], student[1]),
        confidence=confidence,
        bootstrap=bootstrap,
        student=student,
    )


def _check(a: Sequence[float], b: Sequence[float], confidence: float) -> None:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} samples: a ratio pairs rounds, measure both arms together")
    if len(a) < MIN_ROUNDS:
        raise ValueError(f"{len(a)} rounds are too few for an interval; measure at least {MIN_ROUNDS}")
    wrong = [x for x in (*a, *b) if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise ValueError(f"a sample of {wrong[0]} s is no duration; samples are finite and positive")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it lies between 0 and 1, say 0.95")


def _bootstrap(a: Sequence[float], b: Sequence[float], confidence: float, seed: int) -> tuple[float, float]:
    draw = random.Random(seed)
    rounds = range(len(a))
    ratios = []
    for _ in range(RESAMPLES):
        picked = draw.choices(rounds, k=len(a))
        ratios.append(median([a[i] for i in picked]) / median([b[i] for i in picked]))
    ratios.sort()
    tail = (1 - confidence) / 2
    return ratios[math.floor(tail * RESAMPLES)], ratios[math.ceil((1 - tail) * RESAMPLES) - 1]


def _student(a: Sequence[float], b: Sequence[float], confidence: float) -> tuple[float, float]:
    logs = sorted(math.log(x / y) for x, y in zip(a, b, strict=True))
    n, cut = len(logs), int(TRIM * len(logs))
    kept = logs[cut : n - cut]
    centre = fmean(kept)
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    spread = math.sqrt(sum((x - fmean(winsorised)) ** 2 for x in winsorised) / (n - 1))
    error = spread * n / (len(kept) * math.sqrt(n))
    reach = student_quantile(confidence, len(kept) - 1) * error
    return math.exp(centre - reach), math.exp(centre + reach)


def student_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| <= t) = confidence for ``freedom`` degrees of freedom (0.95, 29 -> 2.0452)."""
    low, high = 0.0, math.pi / 2  # the angle atan(t / sqrt(freedom)) is bounded, t is not
    while high - low > 1e-13:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _student_mass(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) * tan(angle)): the finite series of Abramowitz and Stegun 26.7.3-4."""
    odd = freedom % 2
    square = math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    series = math.sin(angle) * total
    return 2 / math.pi * (angle + series) if odd else series
