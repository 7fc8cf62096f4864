"""Ratios of interleaved samples with confidence intervals. Standard library only.

Both arms of a round meet the same clocks and temperature, so rounds are compared in pairs: what
drifts with the machine cancels, and what is left is the kernels' difference and noise. What differs from
one process to the next (addresses, clocks, the neighbours) no number of rounds shows: ``across`` takes
whole processes for its sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

MIN_ROUNDS = 8
RESAMPLES = 2000
POWER = 0.8  # with which a difference that is said to be detectable would have been found
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


def across(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """The ratio of medians over several processes, of each of which a pair is the samples of both arms.

    Student's t on the processes' log ratios; as a cross-check the bootstrap, which resamples processes and
    then rounds within them. Raises ValueError as ``ratio``, and for fewer than two processes.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} process(es) tell nothing of their spread; measure in at least 2")
    for a, b in pairs:
        _check(a, b, confidence)
    logs = [math.log(median(a) / median(b)) for a, b in pairs]
    centre, error = fmean(logs), stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(confidence, len(logs) - 1) * error
    student = math.exp(centre - reach), math.exp(centre + reach)
    bootstrap = _bootstrap_processes(pairs, confidence, seed)
    return Interval(
        estimate=math.exp(centre),
        low=min(bootstrap[0], student[0]),
        high=max(bootstrap[1], student[1]),
        confidence=confidence,
        bootstrap=bootstrap,
        student=student,
    )


def detectable(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], confidence: float = 0.95) -> float:
    """The least relative difference that such a measurement tells from none with a power of 80 %."""
    logs = [math.log(median(a) / median(b)) for a, b in pairs]
    freedom = len(logs) - 1
    quantiles = student_quantile(confidence, freedom) + student_quantile(2 * POWER - 1, freedom)
    return math.expm1(quantiles * stdev(logs) / math.sqrt(len(logs)))


def _bootstrap_processes(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], confidence: float, seed: int
) -> tuple[float, float]:
    draw = random.Random(seed)
    means = []
    for _ in range(RESAMPLES):
        logs = []
        for a, b in draw.choices(pairs, k=len(pairs)):
            picked = draw.choices(range(len(a)), k=len(a))
            logs.append(math.log(median([a[i] for i in picked]) / median([b[i] for i in picked])))
        means.append(math.exp(fmean(logs)))
    return _percentiles(means, confidence)


def _percentiles(values: list[float], confidence: float) -> tuple[float, float]:
    values.sort()
    tail = (1 - confidence) / 2
    return values[math.floor(tail * len(values))], values[math.ceil((1 - tail) * len(values)) - 1]


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
    return _percentiles(ratios, confidence)


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
