"""Tests of comparisons that lose an arm, a worker or the GPU, or that run out of time. Some end early, and
some continue."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_machine import ARMS, Machine, asked, cells, kept_nowhere, never, stood_in

from coda_agent.comparison.competitors import (
    COMPILE,
    EAGER,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    PROGRAM,
    REFERENCE_ARM,
    TORCH,
    UPSTREAM,
)
from coda_agent.comparison.drawing.cells import Cell, Empty, lines
from coda_agent.comparison.interleaved import PREPARING, TIMING, compile_ahead, tune_ahead
from coda_agent.comparison.interleaved import gpu as gpu_task
from coda_agent.comparison.measuring import OutOfTime, measure
from coda_agent.comparison.results import LAYER_FORWARD, Results, read, write
from coda_agent.primitives.system import deadline
from coda_agent.primitives.system.deadline import Late
from coda_agent.verifier.baselines.quack import OWN_TUNER
from coda_agent.verifier.worker import Lost, WorkerError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with stood_in(monkeypatch) as found:
        yield found


def test_a_column_that_takes_the_worker_along_is_left_out(gpu: Machine) -> None:
    gpu.deadly = {OWN_TUNER, LIGER}
    found = cells(measure(asked(), Results(), lambda made: None))
    assert found[HUMAN] == Empty(f"{OWN_TUNER}: crashed: {OWN_TUNER} wrote astray")
    assert found[LIGER] == Empty(f"{LIGER}: crashed: {LIGER} wrote astray")
    assert isinstance(found[LLM], Cell) and isinstance(found[TORCH], Cell)


def test_an_reference_arm_that_dies_ends_its_row_and_not_the_run(gpu: Machine) -> None:
    gpu.deadly = {REFERENCE_ARM}
    found = measure(asked("gemm_swiglu", "gemm_rope", LAYER_FORWARD, processes=2), Results(), kept_nowhere)
    operators, layer = lines(found)[:-1], lines(found)[-1]
    why = f"{PROGRAM}: {REFERENCE_ARM}: crashed: {REFERENCE_ARM} wrote astray"
    assert [line.cells[LLM] for line in operators] == [Empty(why)] * 2
    # the reference arm of layers is eager PyTorch, which does not die
    assert isinstance(layer.cells[LIGER], Cell)
    gpu.sat.clear()
    assert measure(asked("gemm_swiglu", "gemm_rope", processes=2), found, never) == found and not gpu.sat


@pytest.mark.parametrize("python", [None, "/other/python"])
def test_a_worker_lost_before_its_first_arm_ends_the_row_alone(
    gpu: Machine, python: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    gpu.crowded = {python}
    found = measure(asked("gemm_swiglu", "gemm_swiglu_bwd"), Results(), lambda made: write(path, made))
    assert len(gpu.sat) == 4 and found == read(
        path
    )  # no additional session measures the reference arm alone again
    column = LLM if python is None else UPSTREAM
    for line in lines(found):
        empty = line.cells[column]
        assert isinstance(empty, Empty) and "inputs and truth: out_of_memory" in empty.reason
        assert isinstance(line.cells[LLM if python else UPSTREAM], Cell)
        # the matmul was measured in the other environment
        assert isinstance(line.cells[MATMUL], Cell)
    gpu.crowded, gpu.sat = set(), []
    assert measure(asked("gemm_swiglu", "gemm_swiglu_bwd"), found, never) == found and not gpu.sat


def test_a_bug_of_ours_is_told_at_the_end(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Results] = []
    usual = gpu.ask

    def ask(python: str | None, task: Any, asked: Any, **more: Any) -> Any:
        if getattr(asked, "arms", None) and asked.spec.name == "gemm_swiglu":
            more["progress"]("compare", PREPARING)
            raise WorkerError("a task failed:\nTraceback\nKeyError: 'y'")
        return usual(python, task, asked, **more)

    monkeypatch.setattr(gpu, "ask", ask)
    with pytest.raises(WorkerError, match="KeyError"):
        measure(asked("gemm_swiglu", "gemm_rope"), Results(), kept.append)
    bad, good = lines(kept[-1])
    assert isinstance(good.cells[LLM], Cell)
    assert bad.cells[LLM] == Empty(f"{PROGRAM}: a bug in this program, not in the arm: KeyError: 'y'")


def test_a_gpu_that_is_gone_is_in_no_cell(gpu: Machine) -> None:
    """Losing the GPU is no arm's failure. When the GPU is back, the missing sessions are measured."""
    kept: list[Results] = []

    def keep(made: Results) -> None:
        kept.append(made)
        gpu.gone = len(made.sessions) == 1

    wanted = asked("gemm_swiglu", "gemm_rope", processes=2)
    with pytest.raises(Lost, match="uncorrectable ECC"):
        measure(wanted, Results(), keep)
    assert len(kept[-1].sessions) == 1 and not kept[-1].failed()
    gpu.gone = False
    # 4 sessions here, and 2 in the environment of CODA's package, which has no gemm_rope
    assert len(measure(wanted, kept[-1], kept_nowhere).sessions) == 6


@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_that_cannot_begin_is_no_arms_fault(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """If the worker belongs to the environment of CODA's package, only this package's column has no figures.
    If the worker belongs to the main environment, the comparison stops."""
    kept: list[Results] = [Results()]
    usual = gpu.ask

    def ask(python: str | None, task: Any, asked: Any, **more: Any) -> Any:
        if hasattr(asked, "arms") and (python is not None) is apart:
            raise WorkerError("a GPU worker died before its first task: no space left")
        return usual(python, task, asked, **more)

    monkeypatch.setattr(gpu, "ask", ask)
    if apart:
        found = cells(measure(asked(), Results(), kept_nowhere))
        why = "no worker starts in its environment: a GPU worker died before its first task: no space left"
        assert found[UPSTREAM] == Empty(f"{UPSTREAM}: {why}; run coda-agent compare --install")
        assert isinstance(found[LLM], Cell)
        return
    with pytest.raises(WorkerError, match="no space left"):
        measure(asked(), Results(), kept.append)
    assert not kept[-1].sessions


@pytest.mark.parametrize(("arm", "column"), [(LIGER, LIGER), (PROGRAM, LLM), (OWN_TUNER, HUMAN)])
def test_what_is_lost_on_the_clock_is_found_by_halves(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, arm: str, column: str
) -> None:
    """The session's arms are halved until only the arm at fault is left: the model's kernel or a rival. Other
    arms keep their figures. A second comparison measures nothing again."""
    usual = gpu.ask

    def ask(python: str | None, task: Any, asked: Any, **more: Any) -> Any:
        found = usual(python, task, asked, **more)
        if task is not tune_ahead and arm in getattr(asked, "arms", ()):
            more["progress"]("compare", TIMING)
            raise Lost("illegal_address", "somebody wrote astray")
        return found

    monkeypatch.setattr(gpu, "ask", ask)
    made = measure(asked(processes=2), Results(), kept_nowhere)
    found = cells(made)
    assert found[column] == Empty(f"{arm}: during the timing: illegal_address: somebody wrote astray")
    assert all(isinstance(found[name], Cell) for name in (LLM, HUMAN, LIGER, TORCH) if name != column)
    assert sum(set(arms) == {REFERENCE_ARM, arm} for _, arms in gpu.sat) == 1
    gpu.sat.clear()
    assert measure(asked(processes=2), made, never) == made and not gpu.sat


def test_what_takes_longer_than_all_seconds_says_so_and_is_not_begun_again(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm that takes too long fails only if it had the whole budget for itself. If another session used a
    part of the budget, the next command tries the arm again."""
    usual, slow, kept = gpu.ask, {"gemm_swiglu"}, [Results()]

    def ask(python: str | None, task: Any, asked: Any, **more: Any) -> Any:
        found = usual(python, task, asked, **more)
        if task is gpu_task:
            gpu.now += 1.0
        if task is not tune_ahead and LIGER in getattr(asked, "arms", ()) and asked.spec.name in slow:
            more["progress"]("compare", LIGER)
            gpu.now += 499.5
            raise Late
        return found

    monkeypatch.setattr(gpu, "ask", ask)
    wanted = asked("gemm_rope", "gemm_swiglu", arms=(PROGRAM, LIGER), seconds=500.0)
    with pytest.raises(OutOfTime, match="the time ran out during gemm_swiglu 1B: repeat the command"):
        measure(wanted, Results(), kept.append)
    assert not kept[-1].failed() and len(kept[-1].sessions) == 1
    for _ in range(2):
        with contextlib.suppress(OutOfTime):
            measure(wanted, kept[-1], kept.append)
    found = {line.operator: line.cells for line in lines(kept[-1])}["gemm_swiglu"]
    assert found[LIGER] == Empty(f"{LIGER}: not ready within 500 s; repeat with --again and more time")
    assert isinstance(found[LLM], Cell) and kept[-1].failed()
    slow.clear()
    made = measure(asked("gemm_swiglu", arms=(PROGRAM, LIGER), again=True), kept[-1], kept.append)
    assert not made.failed()


def test_nobody_is_waited_for_beyond_the_seconds(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling ahead of the sessions gets half of the budget's seconds. If this time is too short, each
    session compiles its own kernels."""
    left: list[tuple[bool, float]] = []
    usual = gpu.ask

    def ask(python: str | None, task: Any, asked: Any, **more: Any) -> Any:
        if task is compile_ahead or hasattr(asked, "arms"):
            left.append((task is compile_ahead, deadline.within(math.inf) - time.monotonic()))
        if task is compile_ahead:
            raise Late
        return usual(python, task, asked, **more)

    monkeypatch.setattr(gpu, "ask", ask)
    measure(asked(arms=(EAGER, PROGRAM), seconds=500.0), Results(), kept_nowhere)
    assert [ahead for ahead, _ in left] == [True, False] and gpu.sat
    assert 200 < left[0][1] <= 250 and 450 < left[1][1] <= 500
    measure(asked(arms=(EAGER, PROGRAM)), Results(), kept_nowhere)
    assert left[-1] == (False, math.inf)


def test_a_process_that_finds_caches_is_expected_to_take_less(gpu: Machine) -> None:
    # a session takes 260 s: 40 s to prepare each of its six arms, and 20 s for the rest
    gpu.seconds, gpu.prepared = 260.0, 40.0
    kept = [measure(asked(), Results(), kept_nowhere)]
    wanted = asked("gemm_rope", processes=3, arms=ARMS[:-2], seconds=500.0)
    with pytest.raises(OutOfTime):
        measure(wanted, kept[-1], kept.append)
    assert [s.process for s in kept[-1].sessions if s.operator == "gemm_rope"] == [0, 1]


def test_rows_that_a_budget_has_no_time_for_are_not_compiled(gpu: Machine) -> None:
    names, kept = ("gemm_swiglu", "gemm_rope", "gemm_rmsnorm"), list[Results]()
    gpu.seconds = 8.0
    with pytest.raises(OutOfTime):
        measure(asked(*names, arms=(PROGRAM,), seconds=19.0), Results(), kept.append)
    assert [len(rows_) for rows_ in gpu.compiled] == [2] and len(gpu.sat) == 2
    measure(asked(*names, arms=(PROGRAM,), seconds=19.0), kept[-1], kept_nowhere)
    assert [len(rows_) for rows_ in gpu.compiled] == [2, 1] and len(gpu.sat) == 3


def test_a_budget_begins_nothing_that_it_may_not_end(gpu: Machine) -> None:
    kept: list[Results] = []
    gpu.seconds = 100.0
    wanted = asked("gemm_swiglu", "gemm_rope", processes=3, arms=(EAGER,), seconds=350.0)
    with pytest.raises(OutOfTime, match="50 s are left, and gemm_rope 1B may take 100 s"):
        measure(wanted, Results(), kept.append)
    assert len(gpu.sat) == 3 == len(kept[-1].sessions) and gpu.now == 300.0
    assert [s.seconds for s in kept[-1].sessions] == [100.0] * 3
    more = measure(replace(wanted, seconds=300.0), kept[-1], kept_nowhere)
    assert len(more.sessions) == 6


def test_what_takes_longer_than_a_budget_is_begun_first_or_it_never_would(gpu: Machine) -> None:
    kept: list[Results] = []
    gpu.seconds = 100.0
    wanted = asked("gemm_swiglu", processes=3, arms=(EAGER,), seconds=90.0)
    for left in ("-10", "-10", ""):
        found = kept[-1] if kept else Results()
        if left:
            with pytest.raises(OutOfTime, match="may take 100 s"):
                measure(wanted, found, kept.append)
        else:
            measure(wanted, found, kept.append)
    assert len(gpu.sat) == 3 == len(kept[-1].sessions)


def test_a_row_is_expected_to_take_what_its_like_took(gpu: Machine) -> None:
    """An operator's session is expected to take as long as the longest earlier session of an operator in the
    same environment. Sessions of layers, and of CODA's own package, take longer."""
    gpu.seconds, gpu.slow = 50.0, {UPSTREAM: 400.0, LAYER_FORWARD: 300.0}
    rows_, arms = ("gemm_swiglu", LAYER_FORWARD), (EAGER, COMPILE, UPSTREAM)
    found = measure(asked(*rows_, arms=arms), Results(), kept_nowhere)
    assert [s.seconds for s in found.sessions] == [50.0, 400.0, 300.0]
    kept: list[Results] = []
    with pytest.raises(OutOfTime, match="150 s are left, and gemm_rmsnorm_swiglu 1B may take 400 s"):
        measure(asked("gemm_rmsnorm_swiglu", arms=arms, seconds=200.0), found, kept.append)
    assert [s.seconds for s in kept[-1].sessions[3:]] == [50.0]
