"""Ratios over processes, and ratios through an arm that two measurements share. test_timing.py tests the
ratios of one process."""

from __future__ import annotations

import math
import random

import pytest

from coda_agent.verifier import statistics
from coda_agent.verifier.statistics import Interval, across, detectable, product, ratio

ROUNDS, TRIALS = 24, 40


def interval(estimate: float, below: float, above: float) -> Interval:
    """Return an interval whose logarithm has the half widths ``below`` and ``above``. Student's interval has
    the same half widths, and the bootstrap's interval has half of them."""
    ends = [(estimate * math.exp(-below * part), estimate * math.exp(above * part)) for part in (0.5, 1)]
    return Interval(estimate, *ends[1], 0.9, *ends)


@pytest.mark.parametrize("rounds", [8, 13])
@pytest.mark.parametrize("processes", [1, 3])
def test_both_ways_to_draw_anew_draw_the_same(rounds: int, processes: int) -> None:
    """The interval in a report must not depend on whether ``_equal_draws`` or ``_draws`` drew the samples."""
    draw = random.Random(processes)
    rows = tuple(tuple(draw.gauss(0, 1) for _ in range(rounds)) for _ in range(processes))
    assert statistics._equal_draws(rows, 7) == statistics._draws(rows, 7)


def test_half_widths_of_both_steps_add_as_squares_in_logarithms() -> None:
    first, second = interval(2.0, 0.03, 0.05), interval(1.5, 0.04, 0.12)
    found, back = product((first, second)), product((second, first))
    assert found.estimate == back.estimate == 3.0
    assert (found.low, found.high) == pytest.approx((3 * math.exp(-0.05), 3 * math.exp(0.13)), rel=1e-12)
    assert (back.low, back.high) == pytest.approx((found.low, found.high), rel=1e-12)
    assert found.student == pytest.approx((found.low, found.high), rel=1e-12)
    assert found.bootstrap == pytest.approx((3 * math.exp(-0.025), 3 * math.exp(0.065)), rel=1e-12)
    assert found.confidence == 0.9


def test_a_step_without_uncertainty_adds_none() -> None:
    exact, wide = interval(0.5, 0, 0), interval(1.2, 0.02, 0.03)
    for found in (product((exact, wide)), product((wide, exact))):
        assert (found.low, found.high) == pytest.approx((0.5 * wide.low, 0.5 * wide.high), rel=1e-12)


def measured(draw: random.Random, truth: float, noise: float) -> Interval:
    """Return the ratio of two arms in one process. The arms share a drift per round, and each arm has its own
    noise."""
    shared = [math.exp(draw.gauss(0, 0.1)) for _ in range(ROUNDS)]
    first = [truth * x * math.exp(draw.gauss(0, noise)) for x in shared]
    return ratio(first, [x * math.exp(draw.gauss(0, noise)) for x in shared])


@pytest.mark.parametrize("noise", [(0.002, 0.02), (0.02, 0.002), (0.01, 0.01)], ids=str)
def test_intervals_cover_the_truth_whichever_step_is_the_noisy_one(noise: tuple[float, float]) -> None:
    draw, covered, widths = random.Random(4), 0, []
    for _ in range(TRIALS):
        found = product((measured(draw, 1.1, noise[0]), measured(draw, 0.8, noise[1])))
        covered += found.low <= 1.1 * 0.8 <= found.high
        widths.append(math.log(found.high / found.low))
    assert covered >= 0.9 * TRIALS
    # By the noise and the number of rounds, an ideal interval is four standard errors wide. Medians, and the
    # choice of the wider of two intervals, widen it, but to less than twice this width.
    assert sum(widths) / TRIALS < 2 * (4 * math.hypot(*noise) * math.sqrt(2 / ROUNDS))


def test_processes_that_differ_widen_both_intervals_though_their_rounds_agree() -> None:
    steady = [([r] * 12, [1.0] * 12) for r in (0.98, 1.0, 1.02)]
    found = across(steady)
    assert found.bootstrap == pytest.approx((0.98, 1.02))
    assert found.low == found.student[0] < 0.98 and found.high == found.student[1] > 1.02
    # The quantiles of t with two degrees of freedom, from tables: 95% on two sides, and 80% on one side.
    spread = math.log(1.02 / 0.98) / 2
    assert detectable(steady) == pytest.approx(
        math.expm1((4.3027 + 1.0607) * spread / math.sqrt(3)), rel=2e-3
    )


def test_rounds_cut_off_at_either_end_count_as_the_last_kept_ones() -> None:
    """Yuen's interval of ten log ratios, computed by hand. The two ratios at each end are replaced by the
    nearest kept ratio. The values 2 2 2 3 4 5 6 7 7 7 have a sum of squared deviations of 42.5. The quantile
    of t with five degrees of freedom is 2.5706."""
    logs = [0.01 * k for k in range(10)]
    found = ratio([math.exp(x) for x in logs], [1.0] * 10).student
    reach = 2.5706 * 0.01 * math.sqrt(42.5 / 9) * 10 / (6 * math.sqrt(10))
    assert found == pytest.approx((math.exp(0.045 - reach), math.exp(0.045 + reach)), rel=1e-5)
