"""The search for a schedule, raced on a landscape that is written down: no GPU, no clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import kernels
import pytest

from primitives import tune
from primitives.ir import Schedule
from primitives.lower import GemmKernel, lower

SIZES = {"M": 16384, "D": 2048, "F": 5632}


@pytest.fixture
def kernel() -> GemmKernel:
    (gemm,) = lower(kernels.BACKWARD.program).gemms
    assert gemm.c  # a streamed tile, so that all hints count
    return gemm


def found(kernel: GemmKernel, milliseconds: Callable[[Schedule], float]) -> tuple[Schedule, list[int]]:
    """What the search ends at, and how many schedules each race had."""
    fields: list[int] = []

    def race(schedules: list[Schedule], rounds: int) -> list[tuple[Schedule, float]]:
        fields.append(len(schedules))
        assert len(set(schedules)) == len(schedules)
        return sorted(((s, milliseconds(s)) for s in schedules), key=lambda pair: pair[1])

    ranked = tune.search(tune.candidates(kernel, SIZES), partial(tune.refinements, kernel=kernel), race)
    return ranked[0][0], fields


def test_a_tile_that_is_best_at_its_own_group_size_is_found(kernel: GemmKernel) -> None:
    wide = Schedule(128, 160, True, 2, 1, 16, evict_loads=True, deep=True)

    def milliseconds(s: Schedule) -> float:
        if s == wide:
            return 0.9
        if (s.tile_m, s.tile_n, s.pingpong) == (128, 128, True):  # on every cluster, ahead of any other tile
            return 1.0 + s.swizzle / 1e4
        return 1.1 if s._replace(swizzle=16, evict_loads=True) == wide else 1.2

    assert found(kernel, milliseconds)[0] == wide


def test_the_very_best_is_tried_on_a_cluster_of_four(kernel: GemmKernel) -> None:
    best = Schedule(128, 128, True, 2, 2, 8, evict_loads=True, evict_stores=True, deep=True)

    def milliseconds(s: Schedule) -> float:
        return 1.0 + sum(a != b for a, b in zip(s, best, strict=True))

    assert found(kernel, milliseconds)[0] == best


def test_deep_mainloops_are_raced_where_warp_groups_take_turns(kernel: GemmKernel) -> None:
    first = tune.candidates(kernel, SIZES)
    assert {s.pingpong for s in first if s.deep} == {True}
    assert {s._replace(deep=True) for s in first if s.pingpong} <= set(first)
    assert {(s.cluster_m, s.cluster_n) for s in first} == {(1, 2), (2, 1)}


def test_the_last_race_is_short(kernel: GemmKernel) -> None:
    _, fields = found(kernel, lambda s: hash(s) % 1000)
    assert len(fields) == 3 and fields[-1] <= tune.FINAL + tune.FINALISTS
