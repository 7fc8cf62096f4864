"""Threads and streams that call one kernel take turns with its workspace. Processes that need the same tuning
take turns with the cache."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from test_launch import SIZES, inputs_of

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.runtime import executable, launch, tune
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.turns import Turns
from coda_agent.primitives.system import deadline

PROGRAM = kernels.CHAIN.program
TUNED_SIZES = {d: SIZES[d] for d in PROGRAM.signature.dims}
CALLS = 6


class Stream:
    """A stream that logs the streams for which it waits."""

    def __init__(self, number: int, log: list[tuple[Any, ...]]):
        self.number, self.log, self.captured = number, log, False

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("wait", self.number, other.number))


class Streams:
    """A device whose current stream the test chooses. ``asked`` counts the calls of ``current``, which is
    expensive on a real device."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.every = [Stream(n, self.log) for n in range(3)]
        self.now, self.asked = self.every[0], 0

    def handle(self) -> int:
        return self.now.number

    def current(self) -> Stream:
        self.asked += 1
        return self.now

    def capturing(self) -> bool:
        return self.now.captured


class Tensor:
    def __init__(self, log: list[tuple[Any, ...]]):
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(("keep", stream.number))


def test_a_stream_waits_for_the_one_that_had_the_turn_before() -> None:
    streams = Streams()
    turns = Turns(streams, [Tensor(streams.log)])  # type: ignore[list-item]
    for number, log in (
        (0, []),  # stream 0 made the tensors
        (0, []),
        (1, [("wait", 1, 0), ("keep", 1)]),
        (1, []),
        (2, [("wait", 2, 1), ("keep", 2)]),
        (0, [("wait", 0, 2), ("keep", 0)]),
    ):
        streams.log.clear()
        streams.now, before = streams.every[number], streams.asked
        turns.take()
        assert streams.log == log and streams.asked - before == bool(log)


def test_a_captured_stream_waits_for_nothing_and_is_not_waited_for() -> None:
    streams = Streams()
    turns = Turns(streams, [])
    streams.now = streams.every[1]
    streams.now.captured = True
    turns.take()
    assert streams.log == []
    streams.now = streams.every[2]
    turns.take()
    assert streams.log == [("wait", 2, 0)]


def sizes_of(signature: Signature, inputs: dict[str, torch.Tensor], given: Any) -> dict[str, int]:
    return solve_sizes(signature, {k: tuple(t.shape) for k, t in inputs.items()}, given)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each launch adds its thread's id. A launch sleeps, so that other threads run."""
    found: list[int] = []

    def stand_in(lowered: Any, kernel: Any, *rest: Any) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            found.append(threading.get_ident())
            time.sleep(0.002)

        return run

    monkeypatch.setattr("coda_agent.primitives.runtime.executable.compile_gemm", stand_in)
    monkeypatch.setattr("coda_agent.primitives.runtime.executable.compile_vector", stand_in)
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 132 // size)
    monkeypatch.setattr(launch, "check_tensors", sizes_of)  # accept tensors that are not on a GPU
    return found


def at_once(call: Callable[[], object], threads: int = 4) -> None:
    ready, failed = threading.Barrier(threads), []

    def work() -> None:
        ready.wait()
        try:
            for _ in range(CALLS):
                call()
        except Exception as error:  # an uncaught exception in a thread would be lost
            failed.append(error)

    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not failed


def test_tensors_of_a_kind_are_checked_once(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(KernelSource(PROGRAM, dict.fromkeys(range(2), Schedule())))
    inputs = inputs_of(PROGRAM, TUNED_SIZES)
    checks: list[Any] = []

    def check(*given: Any) -> dict[str, int]:
        checks.append(given)
        return sizes_of(*given)

    monkeypatch.setattr(launch, "check_tensors", check)
    fewer = inputs_of(PROGRAM, TUNED_SIZES | {"M": 16})
    for given in (inputs, fewer, inputs, {name: inputs[name] for name in reversed(inputs)}, fewer):
        rows = len(given["x"])
        assert len(kernel(**given)["h"]) == rows
    assert len(checks) == 2
    with pytest.raises(KeyError):
        kernel(**{f"other_{name}": tensor for name, tensor in inputs.items()})
    assert len(checks) == 3


def test_no_call_of_another_thread_comes_between_a_call_s_launches(launched: list[int]) -> None:
    kernel = Kernel(KernelSource(PROGRAM, dict.fromkeys(range(2), Schedule())))
    inputs = inputs_of(PROGRAM, TUNED_SIZES)
    plan = kernel.plan(inputs)
    at_once(lambda: kernel(**inputs))
    whole = len(plan._launches)
    calls = [launched[i : i + whole] for i in range(0, len(launched), whole)]
    assert whole > 1 and len(calls) == 4 * CALLS and all(len(set(call)) == 1 for call in calls)


def test_every_launch_is_of_a_stream_that_waited(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    monkeypatch.setattr(executable, "Turns", lambda *_: Turns(streams, []))
    plan = Plan(KernelSource(PROGRAM, dict.fromkeys(range(2), Schedule())), TUNED_SIZES, "cpu")
    inputs, outputs = inputs_of(PROGRAM, TUNED_SIZES), plan.outputs()
    for number in (0, 1, 1):
        streams.now = streams.every[number]
        plan.run(inputs, outputs)
    streams.now = streams.every[2]
    plan.run_step(0, inputs, outputs)
    assert streams.log == [("wait", 1, 0), ("wait", 2, 1)]


def test_a_thread_s_error_leaves_the_turn_to_others(launched: list[int]) -> None:
    plan = Plan(KernelSource(PROGRAM, dict.fromkeys(range(2), Schedule())), TUNED_SIZES, "cpu")
    inputs, outputs = inputs_of(PROGRAM, TUNED_SIZES), plan.outputs()
    with pytest.raises(KeyError):
        plan.run({}, outputs)
    plan.run(inputs, outputs)
    assert launched


def test_threads_that_come_first_plan_once(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []

    def slowly(*given: Any) -> dict[int, Schedule]:
        tuned.append(threading.get_ident())
        time.sleep(0.05)
        return dict.fromkeys(range(2), Schedule())

    monkeypatch.setattr(launch, "tuned_schedules", slowly)
    kernel, inputs = Kernel(PROGRAM), inputs_of(PROGRAM, TUNED_SIZES)
    plans: list[Plan] = []
    at_once(lambda: plans.append(kernel.plan(inputs)))
    assert len(tuned) == 1 and len({id(plan) for plan in plans}) == 1


def test_a_kernel_with_plans_may_be_copied(launched: list[int]) -> None:
    kernel = Kernel(KernelSource(PROGRAM, dict.fromkeys(range(2), Schedule())))
    kernel(**inputs_of(PROGRAM, TUNED_SIZES))
    for made in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert (made.source, made._plans) == (kernel.source, {})


# processes

_fork = multiprocessing.get_context("fork")


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start with an empty cache; return the path of a log. Every race of any process adds a line with the
    process id to the log."""
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    log = tmp_path / "races"
    log.touch()

    def race(*given: Any) -> list[tuple[Schedule, float]]:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.1)
        return [(schedule, 1.0) for schedule in given[-2]]

    monkeypatch.setattr(tune, "_race", race)
    return log


def _tune(into: Path, ready: Any = None) -> None:
    if ready:
        ready.wait()
    found = tune.tuned_schedules(KernelSource(PROGRAM), {}, TUNED_SIZES)
    into.write_text(json.dumps({step: s.to_json() for step, s in found.items()}))


@contextmanager
def processes(work: list[tuple[Any, ...]]) -> Iterator[list[Any]]:
    started = [_fork.Process(target=_tune, args=given) for given in work]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.join(120)
            assert process.exitcode is not None


def test_one_process_tunes_and_the_others_read_its_result(cold: Path, tmp_path: Path) -> None:
    ready = _fork.Barrier(8)
    results = [tmp_path / f"{n}.json" for n in range(8)]
    with processes([(path, ready) for path in results]) as started:
        pass
    assert [process.exitcode for process in started] == [0] * 8
    assert len(set(cold.read_text().split())) == 1
    assert len({path.read_text() for path in results}) == 1


def test_who_waits_for_a_process_that_is_killed_tunes(cold: Path, tmp_path: Path) -> None:
    with processes([(tmp_path / "first",)]) as (first,):
        while not cold.read_text():
            time.sleep(0.01)
        with processes([(tmp_path / "second",)]) as (second,):
            os.kill(first.pid, signal.SIGKILL)
    assert second.exitcode == 0 and first.exitcode == -signal.SIGKILL
    assert (tmp_path / "second").exists() and not (tmp_path / "first").exists()


def test_who_waits_for_another_s_tuning_waits_until_the_deadline(cold: Path) -> None:
    path = tune.cache_path(KernelSource(PROGRAM), TUNED_SIZES)
    with tune._locked(path), deadline.until(time.monotonic() + 0.2), pytest.raises(deadline.Late):
        tune.tuned_schedules(KernelSource(PROGRAM), {}, TUNED_SIZES)
    assert not cold.read_text()
