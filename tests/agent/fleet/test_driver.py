"""The GPUs that measure a sweep or a bundle: measurements that start again on another GPU, GPUs that are left
out, and an API key that only the driver has.

All slots (cores and GPUs) are fakes, which run their tasks in this process. Checks are real except for the
compiler. Measurements are made up.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authoring import HEADER, TOY_KERNEL, TURNED, Scripted, fenced, make_run, measured, slow, write_toy
from slots import FakeExecutor, FakeSlot
from waiting import eventually

from coda_agent.agent import providers
from coda_agent.agent.artifacts import bundle
from coda_agent.agent.fleet import bundles, objects, pieces, sweep
from coda_agent.agent.fleet.driver import Driver
from coda_agent.agent.fleet.executor import SlotLost
from coda_agent.agent.fleet.pieces import STAGE
from coda_agent.agent.fleet.pool import Pool
from coda_agent.agent.providers import Question, Turn
from coda_agent.agent.reporting import sweep_view
from coda_agent.agent.run import history, runs
from coda_agent.agent.run.budget import Purse, RunLimits
from coda_agent.agent.run.view import RunView
from coda_agent.agent.storage.journal import glance
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gates import Progress, silent
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import Measured, Rejected, Unmeasured
from coda_agent.verifier.worker import Lost, Task, WorkerError

H100 = "NVIDIA H100 80GB HBM3"
BAD = Unmeasured(reason="equal arms differ", evidence={"controls": [{"faults": ["equal arms differ"]}]})
KEY = "sk-ant-fake-of-the-driver"

Measure = Callable[[FakeSlot, dict[str, Any], Progress], Measured | Unmeasured]


class Gpus:
    """Two fake GPUs and one core. A GPU reports one finished stage, then returns the result of
    ``measure``."""

    def __init__(self, measure: Measure):
        self.measure = measure
        self.core = FakeSlot("core")
        self.slots = [FakeSlot(f"GPU-{n}", H100, f"node {n}") for n in (1, 2)]
        for slot in self.slots:
            slot.act = self._act(slot)

    def _act(self, slot: FakeSlot) -> Any:
        def act(task: Task, argument: dict[str, Any], progress: Progress) -> dict[str, Any]:
            # If a fleet has several nodes, ``sharing`` runs the task and also transfers compiled objects.
            if task is objects.sharing:
                return {"answer": act(argument["task"], argument["argument"], progress), "made": []}
            assert task is pieces.measure
            progress(STAGE, json.dumps(["numerics", {"seconds": 1.0}]))
            return self.measure(slot, argument, progress).model_dump(mode="json")

        return act

    def pool(self, record: Any = lambda kind, told: None, **more: Any) -> Pool:
        return Pool(FakeExecutor([self.core, *self.slots]), record, **more)


def fast(slot: FakeSlot, asked: dict[str, Any], progress: Progress) -> Measured:
    spec = pieces.spec_of(asked["entry"]["spec_text"])
    return measured(spec, Program.from_json(asked["entry"]["program"], spec.signature()))


def test_more_runs_start_when_slots_join(runs_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go = list[str](), threading.Event()

    def author(driver: Driver, name: str) -> None:
        started.append(name)
        go.wait(60)

    monkeypatch.setattr(Driver, "_author", author)
    executor = FakeExecutor([])
    pool = Pool(executor, lambda kind, told: None)
    thread = Driver(sweep.create({"limits": {}}), pool, Purse(), RunLimits(), None).start("abcdefghij")
    assert eventually(lambda: len(started) == 4)
    executor.made += [FakeSlot("1"), FakeSlot("2")]
    assert eventually(lambda: len(started) == 8)
    go.set()
    thread.join(60)
    assert started == [*"abcdefghij"]
    pool.close()


@pytest.fixture
def toy(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None, no_keys: None
) -> Path:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setattr(providers, "make", lambda name, **options: Scripted([fenced(TOY_KERNEL)] * 3))
    return write_toy(tmp_path)


def swept(toy: Path, gpus: Gpus, number: int = 1) -> tuple[str, Driver]:
    """Sweep ``number`` runs to their end; return the sweep's name and its driver."""
    made = sweep.create({"limits": {}})
    for place in range(number):
        run = runs.start(toy, HEADER | {"attempts": 1})
        run.journal.close()
        made.once(f"run/{place}", "run", lambda name=run.name: {"run": name})  # type: ignore[misc]
    pool = gpus.pool(made.record)
    driver = Driver(made, pool, Purse(), RunLimits(), MeasureOptions())
    driver.start(driver.unfinished(made.runs()), 2).join(100)
    pool.close()
    driver.close()
    made.close()
    assert driver.bug is None, driver.bug
    return made.name, driver


def test_runs_are_measured_on_gpus_that_the_page_names(toy: Path) -> None:
    gpus = Gpus(fast)
    name, driver = swept(toy, gpus, 3)
    told = sweep_view.as_dict(name)
    assert told["statuses"] == {"accepted": 3} and not driver.problems and told["compiled"] == 1
    assert {"GPU-1", "GPU-2"} <= {slot["name"] for slot in told["slots"]}
    text = sweep_view.write(name).read_text()
    assert "GPU-1" in text and "1.300, the geometric mean of 3 kernels" in text
    asked = [*gpus.core.ran, *gpus.slots[0].ran, *gpus.slots[1].ran]
    assert len(asked) == 3 + 1 + 3 and KEY not in repr(asked)
    assert all(KEY.encode() not in p.read_bytes() for p in runs.runs_dir().rglob("*") if p.is_file())


def test_a_gpu_that_fails_its_controls_stays_out_until_it_is_readmitted(toy: Path) -> None:
    def measure(slot: FakeSlot, asked: dict[str, Any], progress: Progress) -> Measured | Unmeasured:
        return BAD if slot.name == "GPU-1" else fast(slot, asked, progress)

    name, driver = swept(toy, Gpus(measure))
    assert history.past_of(runs.names()[0]).status == "accepted"
    assert driver.pool.left_out == {"GPU-1": "it failed its controls 2 times in a row: equal arms differ"}
    again = sweep.reopen(name)
    assert again.left_out() == driver.pool.left_out and again.kind() == H100
    again.record("readmitted", {"slot": "GPU-1"})
    assert again.left_out() == {}
    again.close()


def test_a_gpu_that_fails_its_controls_once_stays(toy: Path) -> None:
    """A moment of noise must not remove a fleet's only GPU."""
    bad = iter([True])

    def measure(slot: FakeSlot, asked: dict[str, Any], progress: Progress) -> Measured | Unmeasured:
        return BAD if next(bad, False) else fast(slot, asked, progress)

    gpus = Gpus(measure)
    del gpus.slots[1]
    _, driver = swept(toy, gpus)
    assert history.past_of(runs.names()[0]).status == "accepted" and not driver.pool.left_out


def test_a_measurement_begins_anew_when_its_gpu_is_lost(toy: Path) -> None:
    """The first GPU is lost after it has finished a stage. The second GPU measures from the start: it does
    not receive the stage that the first GPU finished."""
    known: list[dict[str, Any]] = []

    def measure(slot: FakeSlot, asked: dict[str, Any], progress: Progress) -> Measured:
        known.append({"gpu": slot.name, "stages": {*asked["stages"]}})
        if len(known) == 1:
            slot.lost = True
            raise SlotLost("its node has gone")
        return fast(slot, asked, progress)

    swept(toy, Gpus(measure))
    (run,) = runs.names()
    assert history.past_of(run).status == "accepted"
    assert known == [{"gpu": "GPU-1", "stages": {"gpu"}}, {"gpu": "GPU-2", "stages": {"gpu"}}]
    (void,) = (e.payload for e in glance(runs.runs_dir() / run / runs.JOURNAL)[1] if e.kind == "void")
    assert "the measurement began on GPU-1 and now has GPU-2" in void["reason"]


def test_a_gpu_on_which_alone_pieces_fail_stays_out(toy: Path) -> None:
    def measure(slot: FakeSlot, asked: dict[str, Any], progress: Progress) -> Measured:
        if slot.name == "GPU-1":
            raise WorkerError("RuntimeError: the driver is too old")
        return fast(slot, asked, progress)

    _, driver = swept(toy, Gpus(measure))
    assert history.past_of(runs.names()[0]).status == "accepted"
    assert "driver is too old" in driver.pool.left_out["GPU-1"]


@pytest.mark.parametrize(
    "hung, gate, passed",
    [("examine", "interpret", set()), ("compile_program", "compile", {"trace", "contract", "interpret"})],
)
def test_a_check_that_hangs_is_rejected_at_its_gate(
    toy: Path, hung: str, gate: str, passed: set[str]
) -> None:
    def act(task: Task, argument: Any, progress: Progress) -> dict[str, Any]:
        if task.__name__ == hung:
            raise Lost("hung", "silent for 300 s")
        return task(argument)

    gpus = Gpus(fast)
    gpus.core.act = act
    name, _ = swept(toy, gpus)
    (run,) = sweep_view.as_dict(name)["runs"]
    (attempt,) = RunView(glance(runs.folder(run["run"]) / runs.JOURNAL)[1]).attempts.values()
    assert isinstance(attempt.report, Rejected) and (attempt.report.gate, attempt.report.code) == (
        gate,
        "hung",
    )
    assert {g.gate for g in attempt.report.gates} == passed


def test_a_bundle_s_entries_are_measured_on_several_gpus(toy: Path, tmp_path: Path) -> None:
    names = [make_run(toy, source) for source in (TOY_KERNEL, TURNED, TOY_KERNEL)]
    packed = bundle.pack(names, tmp_path / "bundle.json")

    def measure(slot: FakeSlot, asked: dict[str, Any], progress: Progress) -> Measured | Unmeasured:
        return BAD if slot.name == "GPU-1" else fast(slot, asked, progress)

    gpus = Gpus(measure)
    out, pool = tmp_path / "results.json", gpus.pool()
    done = bundles.measure(tmp_path / "bundle.json", packed, out, MeasureOptions(), pool, lambda name: silent)
    assert [result.run for result in done.results] == names
    assert {result.measurement["status"] for result in done.results} == {"measured"}
    assert len(gpus.slots[1].ran) == 2  # two kernels: the third entry has the kernel of the first
    assert "GPU-1" in pool.left_out and not (tmp_path / "results.json.partial").exists()
    assert [name for name, _ in bundle.take(out)] == names


def test_a_run_that_an_imported_measurement_rejects_can_continue(toy: Path, tmp_path: Path) -> None:
    made = sweep.create({"limits": {}})
    run = runs.start(toy, HEADER)
    run.journal.close()
    made.once("run/0", "run", lambda: {"run": run.name})
    driver = Driver(made, Gpus(fast).pool(made.record), Purse(), RunLimits(), None)
    driver.start(driver.unfinished([run.name])).join(100)
    assert driver.unfinished([run.name]) == []
    (entry,) = bundle.pack([run.name], tmp_path / "bundle.json").entries
    verdict = slow(run.spec).model_dump(mode="json")
    result = bundle.KernelResult(
        run=run.name, attempt=entry.attempt, identity=entry.identity, measurement=verdict
    )
    bundle.write(tmp_path / "results.json", bundle.BundleResults(results=(result,)))
    assert len([*bundle.take(tmp_path / "results.json")]) == 1
    assert driver.unfinished([run.name]) == [run.name]
    made.close()


def test_ctrl_c_ends_every_run_and_says_how_to_go_on(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from coda_agent.agent.cli import sweep as command

    made = sweep.create({"limits": {}})
    for place in range(3):
        run = runs.start(toy, HEADER)
        run.journal.close()
        made.once(f"run/{place}", "run", lambda name=run.name: {"run": name})  # type: ignore[misc]
    under_way, go = threading.Event(), threading.Event()

    class Slow(Scripted):
        def next_turn(self, question: Question) -> Turn:
            under_way.set()
            go.wait(60)
            return super().next_turn(question)

    def watch(*_: object) -> None:
        under_way.wait(60)
        threading.Timer(0.3, go.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(providers, "make", lambda name, **options: Slow([fenced(TOY_KERNEL)] * 3))
    monkeypatch.setattr(command, "_watch", watch)
    driver = Driver(made, Gpus(fast).pool(made.record), Purse(), RunLimits(), None)
    thread = driver.start(made.runs(), 1)
    with pytest.raises(KeyboardInterrupt):
        command._attend(driver, thread, made.runs(), Console())
    assert not thread.is_alive()
    first, *others = made.runs()
    assert history.past_of(first).attempts == 1  # its answer was paid for and recorded
    assert driver.problems.keys() == {first} and driver.unfinished(made.runs()) == [first, *others]
    assert f"coda-agent resume {made.name}" in capsys.readouterr().err
    made.close()
