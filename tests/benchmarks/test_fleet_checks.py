"""Tests of the benchmark that counts checks on a cluster: which kernels it checks, and the seconds that the
simulation predicts from the pieces of work."""

from __future__ import annotations

from benchmarks.fleet import checks
from coda_agent.agent.fleet.pieces import spec_of


def test_twenty_four_accepted_kernels_are_checked() -> None:
    found = checks.kernels(25)
    assert len(found) == 25 == len({spec_of(spec).name for spec, _ in found})
    assert all(f"def {spec_of(spec).name}(" in source for spec, source in found)


def test_a_prediction_is_that_of_the_simulation() -> None:
    pieces = [[1.0, 2.0], [3.0, 4.0]]
    assert checks.predicted(pieces, 1) == 10.0
    assert checks.predicted(pieces, 2) == 7.0
