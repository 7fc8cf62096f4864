"""Confidence intervals for small samples, for one proportion and for the difference of two proportions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist


def wilson(passed: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of the proportion p = passed / total (total >= 1). With n = total and the
    normal quantile z, the interval is (p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n)."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, n = passed / total, total
    half = z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = ((p + z**2 / (2 * n) + side) / (1 + z**2 / n) for side in (-half, half))
    return max(0.0, low), min(1.0, high)  # a rounding error can make ``high`` exceed 1 by 2e-16


@dataclass(frozen=True)
class Difference:
    """The difference of two proportions, with its confidence interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def difference(passed: int, total: int, others: int, of: int) -> Difference:
    """The difference d = p₁ - p₂ of p₁ = passed / total and p₂ = others / of, with Newcombe's hybrid score
    interval (1998, method 10). Let (l₁, u₁) and (l₂, u₂) be the Wilson intervals of p₁ and p₂. The interval
    of d reaches from d - sqrt((p₁ - l₁)² + (u₂ - p₂)²) to d + sqrt((u₁ - p₁)² + (p₂ - l₂)²)."""
    p, q = passed / total, others / of
    (p_low, p_high), (q_low, q_high) = wilson(passed, total), wilson(others, of)
    below = ((p - p_low) ** 2 + (q_high - q) ** 2) ** 0.5
    above = ((p_high - p) ** 2 + (q - q_low) ** 2) ** 0.5
    return Difference(p - q, p - q - below, p - q + above)
