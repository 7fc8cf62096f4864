"""The budget of a run: its reservations, its settled and uncertain charges, and the end of the run."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import worker_tasks
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    TURNED,
    USAGE,
    Notes,
    Scripted,
    fenced,
    measured,
    slow,
    write_toy,
)
from checkout import PYTHONPATH
from filelock import FileLock

from coda_agent.agent.providers import OutOfBudget, ProviderError, Question, Turn, Usage
from coda_agent.agent.providers.prices import price
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.budget import FEWEST_TOKENS, BudgetLedger, RunLimits, Spent, spent
from coda_agent.agent.run.loop import Loop
from coda_agent.agent.storage.journal import Journal
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system import deadline, subprocesses
from coda_agent.primitives.system.files import cache_dir
from coda_agent.verifier.numerics import cpu_numerics
from coda_agent.verifier.report import Checked, Measured, Rejected
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.stages import Checkpoint
from coda_agent.verifier.worker import Worker

pytestmark = pytest.mark.slow

MODEL = "claude-opus-4-5"
GOOD, BAD = fenced(TOY_KERNEL), fenced(BROKEN)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.create(tmp_path / "journal.db", {"run": "r"}) as made:
        yield made


def ledger(journal: Journal, **limits: Any) -> BudgetLedger:
    return BudgetLedger(journal, RunLimits(**limits), turn=1)


def answer(journal: Journal, ledger: BudgetLedger, usage: Usage, dollars: float | None = None) -> None:
    turn = Turn("text", usage, "Ada", "end_turn", dollars=dollars)
    payload = turn.to_json() | ledger.answered(turn)
    journal.once(f"answer/{ledger.turn}", "answer", lambda: payload)


def amounts(ledger: BudgetLedger) -> tuple[float, ...]:
    found = ledger.spent()
    return found.tokens, found.dollars, found.uncertain_tokens, found.uncertain_dollars


# prices


def test_a_price_by_hand() -> None:
    """The prices in dollars for a million tokens are 5 for input, 25 for output, 0.5 for reading the cache
    and 6.25 for writing the cache."""
    usage = Usage(1000, 2000, 10_000, 4000)
    assert price(MODEL, usage) == pytest.approx((1000 + 0.1 * 10_000 + 1.25 * 4000) * 5e-6 + 2000 * 25e-6)
    assert price("claude-of-nowhere", usage) is None


# reservations


def test_an_answer_settles_the_request_that_gave_it(journal: Journal) -> None:
    book = ledger(journal)
    first = book.reserve(MODEL, 1000, 2000)
    assert first.max_tokens == 2000
    worst = 1000 * 1.25 * 5e-6 + 2000 * 25e-6
    assert amounts(book) == pytest.approx((3000, worst, 3000, worst))
    book.reserve(MODEL, 1000, 2000)
    answer(journal, book, Usage(900, 100))
    paid = 900 * 5e-6 + 100 * 25e-6
    assert amounts(book) == pytest.approx((4000, worst + paid, 3000, worst))
    first.settle(Usage())
    assert amounts(book) == pytest.approx((1000, paid, 0, 0))


def test_a_killed_request_stays_charged_and_the_next_has_a_place_of_its_own(journal: Journal) -> None:
    ledger(journal).reserve(MODEL, 1000, 500)
    again = ledger(journal)
    again.reserve(MODEL, 1000, 500)
    answer(journal, again, Usage(10, 10))
    assert (again.spent().uncertain_tokens, again.spent().tokens) == (1500, 1520)


def test_turns_are_kept_apart(journal: Journal) -> None:
    book = ledger(journal)
    for turn in (1, 11, 2):
        book.turn = turn
        book.reserve(MODEL, 100, 100)
        answer(journal, book, Usage(1, turn))
    assert book.spent().tokens == 3 + 14 and not book.spent().uncertain_tokens


def test_an_answer_without_a_meter_counts_its_tokens(journal: Journal) -> None:
    book = ledger(journal)
    answer(journal, book, USAGE)
    assert book.spent() == Spent(USAGE.total)


def test_what_a_provider_says_it_cost_counts_before_a_price(journal: Journal) -> None:
    book = ledger(journal, dollars=10.0)
    book.reserve(MODEL, 1000, 2000)
    answer(journal, book, Usage(10, 10), dollars=3.5)
    assert amounts(book) == pytest.approx((20, 3.5, 0, 0))
    book.turn = 2
    book.reserve(MODEL, 1000, 2000).settle(Usage(5, 5), 0.25)
    assert amounts(book) == pytest.approx((30, 3.75, 0, 0))


def test_a_model_that_only_the_answer_tells_is_reserved_in_tokens(journal: Journal) -> None:
    book = ledger(journal, dollars=1.0)
    assert book.reserve("", 1000, 2000).max_tokens == 2000
    assert amounts(book) == (3000, 0, 3000, 0)
    answer(journal, book, Usage(10, 10), dollars=3.5)
    assert amounts(book) == (20, 3.5, 0, 0)
    with pytest.raises(OutOfBudget, match="3.5 of 1 dollars used"):
        book.reserve("", 1000, 2000)


def test_an_answer_that_tells_no_tokens_leaves_its_request_charged(journal: Journal) -> None:
    book = ledger(journal)
    book.reserve("", 1000, 2000)
    answer(journal, book, Usage())
    assert amounts(book) == (3000, 0, 3000, 0)


def test_a_ledger_of_another_version_is_read(journal: Journal) -> None:
    """This journal has the events of another version of coda-agent. A failed turn has an event with its
    usage, but no reservation. The GPU seconds are in the event of the measurement, not of its piece."""
    failed = {"usage": {"input_tokens": 5, "output_tokens": 5}, "dollars": None}
    journal.once("settled/1.failed.1", "settled", lambda: failed)
    journal.once("piece/1.0/numerics/large", "piece", lambda: {"conditions": {}})
    journal.once("measurement/1", "measurement", lambda: {"status": "measured", "gpu_seconds": 12.5})
    assert ledger(journal).spent() == Spent(10, gpu_seconds=12.5)


def test_tokens_shrink_an_answer_and_end_a_run(journal: Journal) -> None:
    book = ledger(journal, tokens=10_000)
    assert book.reserve(MODEL, 4000, 3000).max_tokens == 3000
    assert book.reserve(MODEL, 1000, 32_000).max_tokens == 2000
    with pytest.raises(OutOfBudget, match=r"10,000 of 10,000 tokens used.*--budget-tokens"):
        book.reserve(MODEL, 1, 3000)
    book = ledger(journal, tokens=15_000)
    with pytest.raises(OutOfBudget, match="has 900 tokens left for an answer, after 10,000 tokens"):
        book.reserve(MODEL, 4100, 3000)
    assert book.reserve(MODEL, 5000 - FEWEST_TOKENS, 3000).max_tokens == FEWEST_TOKENS
    assert ledger(journal, tokens=16_000).reserve(MODEL, 300, 700).max_tokens == 700  # as many as requested


def test_dollars_shrink_an_answer_at_the_dearest_price(journal: Journal) -> None:
    book = ledger(journal, dollars=0.10)
    charge = book.reserve(MODEL, 4000, 32_000)
    # 0.1 dollars pay for 4000 input tokens at 6.25 dollars a million, and for 3000 output tokens at 25.
    assert charge.max_tokens == 3000
    with pytest.raises(OutOfBudget, match=r"0.1 of 0.1 dollars used.*--budget-dollars"):
        book.afford()
    with pytest.raises(OutOfBudget, match="no price is known for claude-of-nowhere"):
        ledger(journal, dollars=5).reserve("claude-of-nowhere", 10, 2000)


def test_equal_parts() -> None:
    assert RunLimits(100, 1.0, 10.0, 60.0).shared(4) == RunLimits(25, 0.25, 2.5, 60.0)
    assert RunLimits().shared(4) == RunLimits()
    assert RunLimits.from_json(RunLimits(tokens=5, seconds=1.5).to_json()) == RunLimits(tokens=5, seconds=1.5)


# budgets in a run


@pytest.fixture
def begin(runs_home: Path, tmp_path: Path, no_compiler: None) -> Callable[[], runs.Run]:
    return lambda: runs.start(write_toy(tmp_path), HEADER)


class Metered(Scripted):
    def next_turn(self, question: Question) -> Turn:
        question.meter.reserve(MODEL, 1000, 2000)
        return super().next_turn(question)


def loop(run: runs.Run, provider: Scripted, notes: Notes | None = None, **options: Any) -> Loop:
    return Loop(run.journal, run.spec, assembly.task_of(run), provider, notes or Notes(), **options)


def test_a_run_out_of_budget_ends_at_its_last_report_and_goes_on_with_more(
    begin: Callable[[], runs.Run],
) -> None:
    run, notes = begin(), Notes()
    with run.journal:
        outcome = loop(run, Metered([BAD, GOOD]), notes, limits=RunLimits(tokens=3000)).run()
        assert isinstance(outcome.report, Rejected) and "--budget-tokens" in outcome.stopped
        assert [s.tokens for s in notes.costs] == [USAGE.total]
        keys = ["prompt", "reserved/1.1", "answer/1", "report/1", "stopped/1"]
        assert [e.key for e in run.journal.events()] == keys
        assert run.journal.events()[-1].payload == {"reason": outcome.stopped}
        outcome = loop(run, Metered([BAD, GOOD]), limits=RunLimits(tokens=9000)).run()
        assert isinstance(outcome.report, Checked) and not outcome.stopped
        assert spent(run.journal.events()).tokens == 2 * USAGE.total


def test_a_run_that_cannot_begin_says_so(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    with run.journal, pytest.raises(OutOfBudget, match="has 1,000 tokens|has 1000 tokens"):
        loop(run, Metered([GOOD]), limits=RunLimits(tokens=2000)).run()


def test_what_a_failed_turn_cost_is_charged(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    with run.journal, pytest.raises(ProviderError):
        loop(run, Metered([ProviderError("cut", "wait")])).run()
    again = runs.reopen(run.name)
    with again.journal:
        loop(again, Metered([GOOD])).run()
        found = spent(again.journal.events())
        assert (found.uncertain_tokens, found.tokens) == (3000, 3000 + USAGE.total)


def test_time_ends_a_run_before_the_next_request(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    with run.journal:
        going = loop(run, Scripted([BAD, GOOD]), limits=RunLimits(seconds=3600.0))
        going.ledger.began -= 3600
        with pytest.raises(OutOfBudget, match=r"of 3,600 seconds used.*--budget-seconds"):
            going.run()


@dataclass
class Late(Scripted):
    """A provider whose second answer does not come before the question's deadline."""

    ledger: BudgetLedger | None = None

    def next_turn(self, question: Question) -> Turn:
        if question.number == 2:
            assert self.ledger is not None and question.deadline == self.ledger.began + 3600
            self.ledger.began -= 3600
            raise ProviderError("no answer", "wait", retryable=True)
        return super().next_turn(question)


def test_time_that_is_used_up_by_waiting_ends_a_run_as_budgets_do(begin: Callable[[], runs.Run]) -> None:
    for accepted in (False, True):
        run, provider = begin(), Late([GOOD if accepted else BAD])

        def measure(spec: Spec, kernel: KernelSource, *_: object) -> Measured:
            return measured(spec, kernel.program)

        with run.journal:
            going = loop(run, provider, measure=measure, improve=1, limits=RunLimits(seconds=3600.0))
            provider.ledger = going.ledger
            outcome = going.run()
        assert outcome.report.status == ("accepted" if accepted else "rejected")
        assert re.search(r"of 3,600 seconds used.*--budget-seconds", outcome.stopped)


def test_the_gpu_is_charged_by_pieces_from_when_it_is_free(
    begin: Callable[[], runs.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run first waits 1000 s for the lock of the GPU, and this wait is not charged. Then a measurement is
    interrupted in its second piece, so only its first piece is charged. The resumed measurement adds the time
    of its own pieces."""
    now = [0.0]
    monkeypatch.setattr("coda_agent.agent.run.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    lock, held = FileLock(cache_dir() / "gpu.lock", thread_local=False), threading.Event()

    def another() -> None:
        with lock:
            held.set()
            time.sleep(0.3)
            now[0] += 1000

    def measure(spec: Spec, kernel: KernelSource, keep: Checkpoint, *_: object) -> Measured:
        if keep.load("numerics/large") is None:
            now[0] += 5
            keep.save("numerics/large", {"conditions": {}})
            now[0] += 100
            raise KeyboardInterrupt
        assert keep.load("numerics/large") == {"conditions": {}}
        now[0] += 7
        keep.save("score/large", {})
        now[0] += 0.5
        return measured(spec, kernel.program)

    run, thread = begin(), threading.Thread(target=another)
    thread.start()
    held.wait()
    with run.journal:
        with pytest.raises(KeyboardInterrupt):
            loop(run, Scripted([GOOD]), measure=measure).run()
        thread.join()
        assert spent(run.journal.events()).gpu_seconds == 5.0
        outcome = loop(run, Scripted([GOOD]), measure=measure).run()
        assert outcome.report.status == "accepted"
        assert spent(run.journal.events()).gpu_seconds == 12.5


def test_a_gpu_that_is_not_free_in_time_is_not_waited_for(
    begin: Callable[[], runs.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a measurement waits for the GPU until the run's time is up, the measurement does not begin. The
    kernel stays checked."""
    run, measurements = begin(), list[Program]()

    def measure(spec: Spec, kernel: KernelSource, *_: object) -> Measured:
        measurements.append(kernel.program)
        return measured(spec, kernel.program)

    with run.journal:
        going = loop(run, Scripted([GOOD]), measure=measure, limits=RunLimits(seconds=3600.0))
        real = going._check

        def judged(*given: Any) -> dict[str, Any]:
            found = real(*given)
            going.ledger.began -= 3600.0 - 0.3  # 0.3 s are left when the run asks for the GPU
            return found

        monkeypatch.setattr(going, "_check", judged)
        with FileLock(cache_dir() / "gpu.lock", thread_local=False):
            outcome = going.run()
        assert isinstance(outcome.report, Checked) and not measurements
        assert "not measured: " in run.journal.events()[-1].payload["reason"]


def test_gpu_time_is_charged_and_ends_measuring_only(begin: Callable[[], runs.Run]) -> None:
    run = begin()
    measurements: list[KernelSource] = []

    def measure(spec: Spec, kernel: KernelSource, keep: object, kept: object = None) -> Measured | Rejected:
        measurements.append(kernel)
        return slow(spec) if len(measurements) == 1 else measured(spec, kernel.program)

    with run.journal:
        going = loop(run, Scripted([GOOD, GOOD]), measure=measure, limits=RunLimits(gpu_seconds=0.0))
        outcome = going.run()
        assert isinstance(outcome.report, Checked) and not measurements  # the kernel awaits a measurement
        stopped = run.journal.events()[-1]
        assert stopped.key == "stopped/1" and "of 0 gpu seconds" in stopped.payload["reason"]
        going = loop(
            run, Scripted([GOOD, fenced(TURNED)]), measure=measure, limits=RunLimits(gpu_seconds=60.0)
        )
        outcome = going.run()
        assert len(measurements) == 2 and outcome.report.status == "accepted"
        assert 0 <= spent(run.journal.events()).gpu_seconds < 60


# at the deadline, whatever is running is cut off


def hanging_compiler(monkeypatch: pytest.MonkeyPatch, directory: Path) -> list[subprocess.Popen[bytes]]:
    """Replace the compiler by one that never answers; return the list of its processes."""
    (directory / "hanging.py").write_text("import time; time.sleep(600)")
    real, started = subprocesses.converse, list[subprocess.Popen[bytes]]()

    def converse(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real("hanging", **options | {"env": os.environ | {"PYTHONPATH": str(directory)}}))
        return started[-1]

    monkeypatch.setattr(subprocesses, "converse", converse)
    monkeypatch.setattr("coda_agent.primitives.runtime.compile._running", None)
    monkeypatch.setattr("coda_agent.verifier.verify._interpret", lambda *given: None)
    monkeypatch.setenv("CODA_AGENT_CACHE", str(directory / "cache"))
    return started


@pytest.mark.parametrize("gate", ["interpret", "compile"])
def test_a_gate_is_cut_off_at_the_deadline(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """A gate that would never end is cut off at the deadline. The gate leaves no verdict and no running
    process."""
    run, notes, compilers = runs.start(write_toy(tmp_path), HEADER), Notes(), list[subprocess.Popen[bytes]]()
    with run.journal, monkeypatch.context() as patch:
        if gate == "compile":
            compilers = hanging_compiler(patch, tmp_path)
        else:
            real = cpu_numerics.runs
            patch.setattr(cpu_numerics, "runs", lambda *given: itertools.repeat(next(real(*given))))
        with pytest.raises(OutOfBudget, match="of 1.2 seconds used.*--budget-seconds"):
            loop(run, Scripted([GOOD]), notes, limits=RunLimits(seconds=1.2)).run()
        assert [e.key for e in run.journal.events()] == ["prompt", "answer/1", "stopped/1"]
    assert notes.gates and not notes.reports and all(c.returncode is not None for c in compilers)
    with runs.reopen(run.name).journal as journal:
        assert journal.once("answer/1", "answer", dict)["text"] == GOOD


def test_a_measurement_is_cut_off_at_the_deadline_and_charged(
    begin: Callable[[], runs.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real worker hangs during the measurement. The kernel stays checked, and the worker's time is
    charged."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    run, workers = begin(), list[Worker]()

    def measure(spec: Spec, kernel: KernelSource, *_: object) -> Measured:
        with Worker() as worker:
            workers.append(worker)
            worker.ask(worker_tasks.hang, None, patience=300.0)
        raise AssertionError("it hangs")

    with run.journal:
        going = loop(run, Scripted([GOOD]), measure=measure, limits=RunLimits(seconds=3600.0))
        real = going._check

        def judged(*given: Any) -> dict[str, Any]:
            found = real(*given)
            going.ledger.began -= 3600.0 - 10.0  # 10 s are left when the measurement begins
            return found

        monkeypatch.setattr(going, "_check", judged)
        assert isinstance(going.run().report, Checked)
        *_, report, stopped = run.journal.events()
        assert report.key == "report/1" and "not measured: " in stopped.payload["reason"]
        assert 0 < spent(run.journal.events()).gpu_seconds == stopped.payload["gpu_seconds"] < 300
    assert [worker._process.returncode for worker in workers] == [-signal.SIGKILL]


def test_a_wait_that_ends_by_itself_is_not_taken_for_the_deadline() -> None:
    for moment in (None, time.monotonic() + 3600):
        with deadline.until(moment):
            deadline.check(deadline.within(0.0))
            deadline.check()
    with deadline.until(time.monotonic() + 60), pytest.raises(deadline.Late):
        deadline.check(deadline.within(600.0))
    with pytest.raises(deadline.Late), deadline.until(time.monotonic()):
        raise AssertionError("it is late")
    deadline.check()
