"""The intervals of proportions, and of their differences, agree with published values."""

from __future__ import annotations

import pytest

from coda_agent.agent.reporting.proportions import Difference, difference, wilson


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    [  # 10 of 10: the low end is 10/(10 + 1.96²); other rows: published values of Wilson's score interval
        (10, 10, 0.7225, 1.0),
        (0, 10, 0.0, 0.2775),
        (1, 4, 0.0456, 0.6994),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_against_known_values(passed: int, total: int, low: float, high: float) -> None:
    assert wilson(passed, total) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_stays_within_one_and_shrinks_with_runs() -> None:
    for total in range(1, 200):
        low, high = wilson(total, total)
        assert low == pytest.approx(total / (total + 1.959964**2)) and high <= 1.0
    assert wilson(10, 10, confidence=0.5)[0] > wilson(10, 10)[0]


@pytest.mark.parametrize(
    ("passed", "total", "others", "of", "low", "high"),
    [  # Newcombe 1998, "Interval estimation for the difference between independent proportions", table II
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (6, 7, 2, 7, 0.0582, 0.8062),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (0, 10, 0, 20, -0.1611, 0.2775),
        (0, 10, 0, 10, -0.2775, 0.2775),
        (10, 10, 0, 20, 0.6791, 1.0),
        (10, 10, 0, 10, 0.6075, 1.0),
    ],
)
def test_difference_against_published_values(
    passed: int, total: int, others: int, of: int, low: float, high: float
) -> None:
    found = difference(passed, total, others, of)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert found.estimate == pytest.approx(passed / total - others / of)


def test_a_difference_turned_round_is_its_negative() -> None:
    there, back = difference(9, 10, 3, 10), difference(3, 10, 9, 10)
    assert (back.estimate, back.low, back.high) == pytest.approx((-there.estimate, -there.high, -there.low))


def test_a_difference_has_its_sign() -> None:
    assert str(Difference(0.2, -0.322, 1.0)) == "+0.20 [-0.32, +1.00]"
