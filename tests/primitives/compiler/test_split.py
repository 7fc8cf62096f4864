"""A split step runs in two launches. The tests check which rows each launch computes, and in which order the
launches run."""

from __future__ import annotations

from math import ceil
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coda_agent.primitives.compiler.split import ordered, share
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.schedule import Schedule

SPLIT = Schedule(128, 128, True, 2, 2, split=True)


def waves(rows: int, columns: int, schedule: Schedule, clusters: int) -> int:
    return ceil(ceil(rows / schedule.cluster_m) * ceil(columns / schedule.cluster_n) / clusters)


@given(st.integers(1, 40000), st.integers(1, 20000), st.integers(1, 33), st.integers(0, 20))
def test_no_other_share_ends_sooner(rows: int, columns: int, first: int, second: int) -> None:
    taken = share((rows, columns), SPLIT, first, second)
    high, wide = ceil(rows / 128), ceil(columns / 128)
    # if there are two launches, the first computes only whole clusters of tiles
    assert taken == rows or (0 < taken < rows and taken % 256 == 0 and second)

    def longest(tiles: int) -> int:
        rest = waves(high - tiles, wide, SPLIT.rest, second) if tiles < high else 0
        return max(waves(tiles, wide, SPLIT, first), rest)

    if second:
        assert all(longest(ceil(taken / 128)) <= longest(tiles) for tiles in range(2, high + 1, 2))


def test_an_h100s_shares() -> None:
    """An H100 has room for 30 clusters of four CTAs, and beside them for 6 clusters of two CTAs. The second
    launch starts last, so it gets rows only if the first launch then needs fewer waves."""
    assert share((16384, 5632), SPLIT, 30, 6) == 16384 - 8 * 128
    assert share((16384, 12288), SPLIT, 30, 6) == 16384 - 10 * 128
    assert share((128, 4096), SPLIT, 30, 6) == 128  # the first launch needs less than a wave for 128 rows
    assert share((16384, 5632), SPLIT, 33, 0) == 16384  # no SM is left for a second launch


def test_one_thread_at_a_time_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread traces a second launch, griddepcontrol is replaced. A plain kernel that another thread
    traces must not see the replacement."""
    from cutlass.experimental import primitives as prims

    usual, seen, inside, done = prims.griddepcontrol, list[object](), Event(), Event()

    def plain() -> None:
        inside.wait(10)
        with ordered(Schedule()):
            seen.append(prims.griddepcontrol)
        done.set()

    thread = Thread(target=plain)
    thread.start()
    with ordered(SPLIT.rest):
        assert prims.griddepcontrol is not usual
        inside.set()
        assert not done.wait(0.2)
        with ordered(Schedule()):  # the thread that replaced griddepcontrol may trace other kernels
            pass
    thread.join(10)
    assert seen == [usual] and prims.griddepcontrol is usual


def test_the_second_launch_starts_with_the_first_and_ends_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass.experimental import primitives as prims

    wait, launch = prims.GridDepAction.WAIT, prims.GridDepAction.LAUNCH_DEPENDENTS
    said: list[object] = []
    monkeypatch.setattr(prims, "griddepcontrol", said.append)
    usual = prims.griddepcontrol
    expected = {
        SPLIT._replace(split=False): [wait, launch],
        SPLIT: [wait, launch, launch],
        SPLIT.rest: [wait],  # a block waits at its end, where a block usually lets the next grid start
    }
    for schedule, order in expected.items():
        said.clear()
        with ordered(schedule):
            prims.griddepcontrol(wait)
            assert said == order[: len(order) - 1]
            prims.griddepcontrol(launch)
        assert said == order and prims.griddepcontrol == usual


def test_who_has_no_idle_sms_cannot_be_split() -> None:
    assert SPLIT.launches == (SPLIT, SPLIT._replace(cluster_m=1)) and Schedule().launches == (Schedule(),)
    assert Schedule.from_json(SPLIT.to_json()) == SPLIT
    with pytest.raises(ProgramError, match="split takes a cluster of four"):
        Schedule.from_json(SPLIT.rest.to_json())
