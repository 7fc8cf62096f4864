"""Tests of a comparison on several GPUs: each row is measured on one GPU, and starts again on another GPU if
its GPU is lost.

The GPUs are fake, as in test_compare.py. The slots are threads of this process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from comparison_machine import Machine, asked, kept_nowhere, stood_in
from slots import FakeExecutor, FakeSlot

from coda_agent.agent.fleet.executor import SlotLost
from coda_agent.agent.fleet.pieces import STAGE
from coda_agent.agent.fleet.pool import GivenUp, Pool
from coda_agent.comparison import rows, spread
from coda_agent.comparison.measuring import OutOfTime
from coda_agent.comparison.results import Results
from coda_agent.verifier.gates import Progress, silent
from coda_agent.verifier.worker import Task

H100 = "NVIDIA H100 80GB HBM3"
NAMES = ("gemm_swiglu", "gemm_rope", "gemm_rmsnorm")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with stood_in(monkeypatch) as found:
        yield found


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeSlot, FakeSlot]:
    """Return the slots of two GPUs. Only one GPU works at a time, because both GPUs share one fake
    machine."""
    turn = threading.Lock()

    def act(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        with turn:
            monkeypatch.setattr(spread, "report", progress)
            return task(argument)

    return FakeSlot("GPU-1", H100, "a", act), FakeSlot("GPU-2", H100, "b", act)


def pool(*slots: FakeSlot) -> Pool:
    return Pool(FakeExecutor(list(slots)), lambda kind, told: None)


def by_row(results: Results) -> dict[str, set[str]]:
    """Return, for each operator, the GPUs on which its sessions were measured."""
    found: dict[str, set[str]] = {}
    for session in results.sessions:
        found.setdefault(session.operator, set()).add(session.conditions[spread.UUID])
    return found


def test_every_row_is_measured_on_one_gpu(gpu: Machine, slots: tuple[FakeSlot, FakeSlot]) -> None:
    kept: list[Results] = []
    made = spread.measure(asked(*NAMES, processes=2), Results(), kept.append, silent, pool(*slots))
    assert by_row(made).keys() == set(NAMES)
    assert all(len(gpus) == 1 for gpus in by_row(made).values())
    assert kept[-1] == made and gpu.ceilings == 1
    assert all(slot.ran for slot in slots)
    again = spread.measure(asked(*NAMES, processes=2), made, kept.append, silent, pool(*slots))
    assert len(again.sessions) == len(made.sessions)


def test_the_time_limit_holds_for_all_rows_together(
    gpu: Machine, slots: tuple[FakeSlot, FakeSlot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "monotonic", lambda: gpu.now)
    gpu.seconds, kept = 20.0, list[Results]()
    wanted = asked(*NAMES, processes=2, seconds=100)
    with pytest.raises(OutOfTime, match="repeat the command to continue"):
        spread.measure(wanted, Results(), kept.append, silent, pool(slots[0]))
    assert len(kept[-1].sessions) == 5 and gpu.now <= 100 and not kept[-1].failed()


def test_a_row_whose_gpu_fails_at_once_is_named(gpu: Machine, slots: tuple[FakeSlot, FakeSlot]) -> None:
    """The row's operator has another case in the results."""
    first = spread.measure(asked("gemm_swiglu"), Results(), kept_nowhere, silent, pool(slots[0]))
    (seven,) = rows.choose_rows(("gemm_swiglu",), ("7B",), everything=False, quick=False)
    gpu.gone = True
    with pytest.raises(GivenUp, match="gemm_swiglu 7B measure failed twice"):
        spread.measure(replace(asked(), rows=(seven,)), first, kept_nowhere, silent, pool(slots[0]))


def test_a_lost_gpu_s_row_begins_anew_on_another(gpu: Machine, slots: tuple[FakeSlot, FakeSlot]) -> None:
    first, second = slots
    usual, stages = first.act, 0

    def act(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        def heard(gate: str, words: str) -> None:
            nonlocal stages
            progress(gate, words)
            stages += gate == STAGE
            # the three reports follow the ceilings, the row's definition, and the row's first session
            if stages == 3:
                first.lost = True
                raise SlotLost("its node has gone")

        return usual(task, argument, heard)

    first.act = act
    found = pool(first)
    threading.Timer(1.0, lambda: found.executor.made.append(second)).start()  # type: ignore[attr-defined]
    made = spread.measure(asked("gemm_swiglu", processes=2), Results(), kept_nowhere, silent, found)
    assert stages == 3 and by_row(made) == {"gemm_swiglu": {"GPU-2"}}


def test_a_row_that_is_complete_stays_as_it_is(gpu: Machine, slots: tuple[FakeSlot, FakeSlot]) -> None:
    first, second = slots
    made = spread.measure(asked("gemm_swiglu"), Results(), kept_nowhere, silent, pool(first))
    sat = len(gpu.sat)
    same = spread.measure(asked("gemm_swiglu"), made, kept_nowhere, silent, pool(second))
    assert same.sessions == made.sessions and len(gpu.sat) == sat


def test_the_end_of_the_time_is_told_after_all_rows(gpu: Machine, slots: tuple[FakeSlot, FakeSlot]) -> None:
    gpu.seconds = 60.0
    with pytest.raises(OutOfTime):
        spread.measure(asked(*NAMES, processes=3, seconds=100), Results(), kept_nowhere, silent, pool(*slots))
