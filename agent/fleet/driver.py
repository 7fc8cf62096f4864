"""Drive a sweep: author its runs in threads, and lease slots (cores and GPUs) for their checks and
measurements.

An author mostly waits for the network, so one process can drive many runs. A run that loses its slot
continues from its journal and from the stored stages of its measurement, like a run that was killed.
Therefore no answer, verdict or finished stage is lost.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.agent.artifacts import bundle
from coda_agent.agent.fleet import pieces
from coda_agent.agent.fleet.executor import Slot, SlotLost
from coda_agent.agent.fleet.objects import run_shared
from coda_agent.agent.fleet.pool import LOSSES, GivenUp, Pool, Suspect
from coda_agent.agent.fleet.sweep import Sweep, compile_key
from coda_agent.agent.run import assembly, history, runs
from coda_agent.agent.run.budget import Purse, RunLimits, Spent
from coda_agent.agent.run.loop import Loop, Outcome
from coda_agent.agent.run.runs import Run
from coda_agent.agent.run.task import AuthoringTask
from coda_agent.agent.storage import quack_tunings
from coda_agent.agent.storage.checkpoint import SAME
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule, schedules_json
from coda_agent.verifier.gates import Progress, identity
from coda_agent.verifier.report import (
    MEASUREMENT,
    Checked,
    Gate,
    Measurement,
    Rejected,
    Report,
    Unmeasured,
)
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.stages import Checkpoint
from coda_agent.verifier.verify import Verdict
from coda_agent.verifier.worker import Lost

if TYPE_CHECKING:
    from coda_agent.verifier.incumbent import Incumbent
    from coda_agent.verifier.measure import MeasureOptions

# Work on a core counts as hung after this many seconds without a message. The limit is long, because
# compiling is slow.
SILENCE = 900.0
MEASURING = 1800.0  # like SILENCE, for work on a GPU, which starts processes that have limits of their own
UNMEASURED = "checked, not benchmarked: no GPU of the fleet was asked"
PER_SLOT = 4  # runs in progress per slot, so that slots have work while other runs wait for answers
TICK = 0.05  # seconds between two looks whether another run may start
VOIDS = 3  # a run or bundle entry ends after this many invalid measurements; resuming measures again


@dataclass
class Driver:
    """One session of a sweep: the work of one process that starts or resumes the sweep. ``measuring``: how to
    measure; None if this session uses no GPU. ``given``: options that replace the runs' own options."""

    sweep: Sweep
    pool: Pool
    purse: Purse
    limits: RunLimits
    measuring: MeasureOptions | None
    given: Mapping[str, Any] = field(default_factory=dict)
    now: dict[str, str] = field(default_factory=dict)  # what each run does now, by run
    problems: dict[str, str] = field(default_factory=dict)  # why a run ended early, by the run's name
    ended: list[str] = field(default_factory=list)  # one message per ended run, in order
    began: float = field(default_factory=time.process_time)
    bug: BaseException | None = None

    def unfinished(self, names: Sequence[str]) -> list[str]:
        """The runs that can continue: unfinished runs, runs that ended early, runs whose kernel this session
        can still measure, and runs whose kernel an imported measurement rejects. If the command gave new
        options, all runs can continue."""
        ended = {e.payload["run"]: e.payload for e in self.sweep.journal.events() if e.kind == "ended"}

        def continues(name: str) -> bool:
            if self.given or name not in ended or ended[name]["stopped"]:
                return True
            now = history.past_of(name).status
            if now == "checked":
                return self.measuring is not None
            return now == "rejected" and ended[name].get("status") == "checked"

        return [name for name in names if continues(name)]

    def news(self) -> list[str]:
        """Lines on the sweep's state, for output without a live table."""
        lines = [*self.ended, *(f"left out: {slot}: {why}" for slot, why in list(self.pool.left_out.items()))]
        return lines + [f"refused: {node}: {why}" for node, why in list(self.pool.refusals.items())]

    def close(self) -> None:
        """Record the processor time that the driver used."""
        self.sweep.record("session", {"driver_seconds": round(time.process_time() - self.began, 3)})

    def start(self, names: Sequence[str], at_once: int | None = None) -> threading.Thread:
        """Author these runs in threads that die with this process, at most ``at_once`` at a time. By default,
        at most ``PER_SLOT`` per slot of the pool, which slots may still join. Return a thread that ends after
        all others."""

        def author_all() -> None:
            running: list[threading.Thread] = []
            for name in names:
                while len(running) >= (at_once or PER_SLOT * max(1, len(self.pool.uses))):
                    time.sleep(TICK)
                    running = [thread for thread in running if thread.is_alive()]
                if self.purse.stopped or self.bug:
                    break
                running.append(threading.Thread(target=self._author, args=(name,), daemon=True))
                running[-1].start()
            for thread in running:
                thread.join()

        thread = threading.Thread(target=author_all, daemon=True)
        thread.start()
        return thread

    def _author(self, name: str) -> None:
        """Author a run to its end. An expected error ends only this run; a bug ends the whole sweep."""
        try:
            self.now[name], status = "opening", history.UNDECIDED
            outcome = self._authored(name)
            problem, status = outcome.stopped, outcome.report.status
        except CodaError as error:
            problem = str(error)
        except BaseException as error:
            self.bug = error
            problem = f"a bug: {error!r}"
        self.now.pop(name, None)
        self.problems.pop(name, None)
        if problem:
            self.problems[name] = problem
        self.ended.append(f"{name}: {status}" + (f", stopped: {problem}" if problem else ""))
        self.sweep.record("ended", {"run": name, "stopped": problem, "status": status})

    def _authored(self, name: str) -> Outcome:
        lost, voids = 0, 0
        while True:
            run = runs.reopen(name)
            try:
                one = _OnSlots(self, run)
                outcome = one.loop().run()
            except Suspect:
                continue
            except SlotLost as error:
                lost += 1
                if lost == LOSSES:
                    raise GivenUp(
                        f"{LOSSES} GPUs were lost while they ran it, the last one: {error}"
                    ) from None
                continue
            finally:
                run.journal.close()
            voids += one.voided
            if not one.voided or voids >= VOIDS or self.purse.stopped:
                return outcome


@dataclass
class _OnSlots:
    """One run whose checks and measurements use slots of the pool."""

    driver: Driver
    run: Run
    gpu: Slot | None = None
    voided: bool = False

    def loop(self) -> Loop:
        driver, run = self.driver, self.run
        header = {**run.journal.header, **driver.given}
        task = assembly.task_of(run)
        assert isinstance(task, AuthoringTask)  # a sweep contains only runs of this task
        return Loop(
            run.journal,
            run.spec,
            replace(task, elsewhere=self.check),
            assembly.provider_of(run, header),
            _Listener(driver.now, run.name),
            header["attempts"],
            self.measure if driver.measuring else None,
            driver.limits,
            header.get("improve", 0),
            driver.purse,
            self.lease,
        )

    def check(
        self,
        spec: Spec,
        source: str,
        *,
        schedules: Mapping[int, Schedule],
        weak_jail: bool,
        progress: Progress,
    ) -> Verdict:
        """Run the gates that need no GPU. First a slot examines the source. Then a slot compiles the source's
        program, if this sweep has not yet compiled the same program."""
        pool, name = self.driver.pool, self.run.name
        asked = {"spec": self.run.text, "source": source, "weak_jail": weak_jail}
        asked["schedules"] = schedules_json(schedules)
        gates: tuple[Gate, ...] = ()
        try:
            found = pool.run(f"{name} check", pieces.examine, asked, patience=SILENCE, progress=progress)
            if "rejected" in found:
                return Verdict(Rejected.model_validate(found["rejected"]), None)
            program = Program.from_json(found["program"], spec.signature())
            gates = tuple(map(Gate.model_validate, found["gates"]))

            def compiled() -> dict[str, Any]:
                wanted = {"spec": self.run.text, **found}
                made = pool.run(
                    f"{name} compile", pieces.compile_program, wanted, patience=SILENCE, progress=progress
                )
                if "rejected" in made:
                    raise _Refused(Rejected.model_validate(made["rejected"]))
                return made

            made = self.driver.sweep.once(compile_key(spec.hash, program), "compile", compiled)
        except _Refused as refused:
            return Verdict(refused.report, None)
        except Lost as lost:
            gate = "compile" if gates else "interpret"
            return Verdict(Rejected(gate=gate, code=lost.code, message=lost.message, gates=gates), None)
        gates += (Gate.model_validate(made["gate"]),)
        own = identity(spec, KernelSource(program))
        report = Checked(identity=own, gates=gates, unmeasured=UNMEASURED)
        return Verdict(report, program)

    @contextmanager
    def lease(self, say: Any, deadline: float | None) -> Iterator[Slot]:
        """Hold a GPU of the fleet during the block."""
        self.driver.now[self.run.name] = "waiting for a GPU"
        with self.driver.pool.lease(True, f"{self.run.name} measure", deadline) as self.gpu:
            yield self.gpu

    def measure(self, spec: Spec, kernel: KernelSource, keep: Any, kept: Incumbent | None) -> Measurement:
        """Measure on the leased GPU."""
        assert self.gpu is not None and self.driver.measuring is not None
        quack = quack_tunings.quack(spec)
        entry = bundle.PackedKernel(
            run=self.run.name,
            attempt=0,
            spec_text=self.run.text,
            program=kernel.program.to_json(),
            identity=identity(spec, kernel),
            quack=quack,
            kept=bundle.PackedIncumbent.of(kept) if kept else None,
        )
        heard = _Listener(self.driver.now, self.run.name).gate
        found = measured_on(self.driver.pool, self.gpu, entry, self.driver.measuring, keep, heard)
        if isinstance(found, Unmeasured):
            self.voided = True
        return found


def spent_before(names: Sequence[str]) -> dict[str, Spent]:
    """Return what each run has spent so far."""
    return {name: history.past_of(name).spent for name in names}


class _Refused(Exception):
    def __init__(self, report: Rejected):
        self.report = report


class Stages(Checkpoint, Protocol):
    """A store of a measurement's finished stages. ``known`` returns all stored stages by name."""

    def known(self) -> dict[str, dict[str, Any]]: ...


def measured_on(
    pool: Pool,
    slot: Slot,
    entry: bundle.PackedKernel,
    options: MeasureOptions,
    keep: Stages,
    progress: Progress,
) -> Measurement:
    """Measure an entry on the GPU ``slot``. The slot sends each finished stage, and ``keep`` stores the
    stage. Tell the pool whether the GPU failed its controls. A GPU fails its controls if it measures a
    difference between equal arms, or if it misses the planted delay. Raises SlotLost."""
    began = keep.load(SAME)
    if began is None:
        keep.save(SAME, {"gpu": slot.name})
    elif began["gpu"] != slot.name:  # one measurement must not use two GPUs
        reason = f"the measurement began on {began['gpu']} and now has {slot.name}: it starts again"
        return Unmeasured(reason=reason)
    asked = {"entry": entry.model_dump(mode="json"), "options": options, "stages": keep.known()}
    asked |= {"place": f"run {entry.run}"}

    def heard(gate: str, words: str) -> None:
        if gate == pieces.STAGE:
            keep.save(*json.loads(words))
        else:
            progress(gate, words)

    label = entry.identity.spec_hash
    told = run_shared(pool, slot, label, pieces.measure, asked, patience=MEASURING, progress=heard)
    found, fault = MEASUREMENT.validate_python(told), ""
    if isinstance(found, Unmeasured) and found.evidence.get("controls"):
        fault = found.reason
    pool.controlled(slot, fault)
    return found


@dataclass
class _Listener:
    """A listener that stores what a run does now, for the live table."""

    now: dict[str, str]
    run: str

    def attempt(self, number: int, limit: int) -> None:
        self.now[self.run] = f"attempt {number}: waiting for an answer"

    def text(self, words: str) -> None:
        if line := words.strip():
            self.now[self.run] = f"author: {line.splitlines()[-1]}"

    def gate(self, name: str, words: str) -> None:
        self.now[self.run] = f"{name} {words}"

    def report(self, number: int, report: Report) -> None:
        self.now[self.run] = f"attempt {number} {report.status}"

    def tool(self, name: str, words: str) -> None:
        self.now[self.run] = f"tool {name}"

    def spent(self, spent: Spent) -> None: ...
