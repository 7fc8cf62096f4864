"""Measure the missing parts of a comparison, one session at a time, and store each session when it ends.

Rows are measured one after another, so that an interrupted run leaves complete rows. Every session has its
own worker, which has the GPU to itself. If a session's worker is lost, the session is repeated without the
arm that was running. If the inputs or the reference arm do not fit in memory, the row is skipped, and the
row's empty table cells give the reason.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from coda_agent.comparison import environment
from coda_agent.comparison.competitors import COLUMNS, EDITED, FUSED, PROGRAM, UPSTREAM
from coda_agent.comparison.interleaved import PREPARING, TIMING, compile_ahead, gpu, machine, tune_ahead
from coda_agent.comparison.keys import keyed
from coda_agent.comparison.results import (
    GONE,
    ArmFailure,
    ArmResult,
    MeasuredMachine,
    Present,
    Results,
    Session,
)
from coda_agent.comparison.rows import Row
from coda_agent.comparison.workers import Workers
from coda_agent.primitives.errors import CodaError, InvalidInput
from coda_agent.primitives.system import deadline
from coda_agent.primitives.system.deadline import Late
from coda_agent.verifier.gates import Failed, Progress, silent
from coda_agent.verifier.gpu.checks import clean
from coda_agent.verifier.stages import PATIENCE
from coda_agent.verifier.worker import Lost, Task, WorkerError

BEHIND = 1.03  # an arm is not timed again if its time exceeds the column's shortest time by this factor
SESSION_SECONDS = 10.0  # approximate duration of a session with full caches
CACHED = 0.5  # the next process finds at least this fraction of the preparation in caches
OURS = (PROGRAM, EDITED, FUSED)

Keep = Callable[[Results], object]
Ahead = tuple[str, Task, Any]  # a row, a task to run before the row's sessions, and the task's argument


class OutOfTime(CodaError):
    """The time limit has passed, or leaves too little time for the next session. The message says what to
    do."""

    exit_status = 4


@dataclass(frozen=True)
class ComparisonRequest:
    """A request to measure the ``arms`` of each of the ``rows``. ``processes``: the number of processes per
    row. ``rounds``: the most rounds in each process. ``seconds``: the time limit of the whole request, of
    which ``spent`` whole seconds are over. ``again``: repeat failed arms."""

    rows: tuple[Row, ...]
    arms: tuple[str, ...]
    processes: int
    rounds: int
    seconds: float = math.inf
    again: bool = False
    spent: int = 0


class ProcessRow(NamedTuple):
    """One row to measure in one process. ``process``: the number of the process. ``apart``: the process uses
    the environment of CODA's own package."""

    row: Row
    process: int
    apart: bool


def measure(asked: ComparisonRequest, results: Results, keep: Keep, progress: Progress = silent) -> Results:
    """Measure every missing session; ``keep`` receives the results after each session.

    ``progress`` receives the current row and arm. Raises OutOfTime. Raises InvalidInput if the results come
    from another GPU, and Failed if no worker has a GPU. If a session meets a bug in this program, raises
    WorkerError after the last session.
    """
    measuring = _Measuring(asked, results, keep, progress)
    try:
        measuring.run()
    finally:
        measuring.workers.close()
    return measuring.results


def lacks(asked: ComparisonRequest, results: Results) -> bool:
    """Whether ``measure`` would run any session on this machine, with its GPU and installed packages."""
    measuring = _Measuring(asked, results, lambda made: None, silent)
    try:
        return measuring.lacks()
    finally:
        measuring.workers.close()


@dataclass
class _Measuring:
    asked: ComparisonRequest
    results: Results
    keep: Keep
    progress: Progress
    workers: Workers = field(default_factory=Workers)
    keys: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)  # by row, then by arm
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # by arm
    bug: WorkerError | None = None
    # rows measured in this run: operator, case, and whether in the environment of CODA's own package
    measured: set[tuple[str, str, bool]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.end = monotonic() + self.asked.seconds - self.asked.spent
        self.upstream = environment.python()
        # a failure counts only if it is in a session with at least this number
        self.heeded = len(self.results.sessions) if self.asked.again else 0

    def run(self) -> None:
        self.machine = self._known_machine()
        before = self.results
        for row in self.asked.rows:  # find all keys first, so that tables show all changes immediately
            self._keys(row)
        if self.results != before:
            self.keep(self.results)
        turns = self._turns()
        self._prepare([turn for turn in turns if not turn.apart])
        for place, turn in enumerate(turns):
            if arms := self._lacking(turn):
                self._expect_time(turn)
                later = filter(self._lacking, turns[place + 1 :])
                self.workers.coming = [self._python(other) for other in later]
                self._run_session(turn, arms)
        if self.bug:
            raise self.bug

    def lacks(self) -> bool:
        self.machine = self._known_machine()
        return any(map(self._lacking, self._turns()))

    def _turns(self) -> list[ProcessRow]:
        turns = itertools.product(self.asked.rows, range(self.asked.processes), (False, True))
        return [ProcessRow(*turn) for turn in turns]

    def _python(self, turn: ProcessRow) -> str | None:
        """The interpreter of the environment for this row; None for the current environment."""
        return self.upstream if turn.apart else None

    def _known_machine(self) -> MeasuredMachine:
        """The machine that the results record. If they record none, measure the machine now. Raises
        InvalidInput if the results come from another GPU."""
        new = self.results.machine is None
        self.workers.coming = [None]  # prepare a worker in case a session follows
        with closing(self.workers.take(None) if new else self.workers.bare()) as worker:
            self.workers.begin()
            told = worker.ask(gpu, None, patience=PATIENCE)
            name, self.build = told["gpu"], "{gpu}, PyTorch {torch}, CUDA {cuda}".format_map(told)
            if others := self.results.gpus() - {name}:
                raise InvalidInput(
                    f"these results were measured on {' and '.join(sorted(others))}, but this is {name}: "
                    "a table cannot mix GPUs; measure into another folder: --out FOLDER"
                )
            if new:
                self.progress(name, "the peak rates of its memory and tensor cores")
                found = MeasuredMachine.model_validate(worker.ask(machine, None, patience=PATIENCE))
                self.results = self.results.model_copy(update={"machine": found})
                self.keep(self.results)
        assert self.results.machine is not None
        return self.results.machine

    def _prepare(self, turns: Sequence[ProcessRow]) -> None:
        """Compile and tune before the sessions, in at most half of the remaining time. Rows that the time
        limit will hardly allow are left out. Failures are ignored, because the same arms will fail again in
        their sessions."""
        requests: dict[str, Any] = {}
        for row, own in itertools.groupby(turns, key=lambda turn: turn.row):
            if len(requests) * self.asked.processes * SESSION_SECONDS >= self.asked.seconds:
                break
            if arms := dict.fromkeys(arm for turn in own for arm in self._lacking(turn)):
                requests[f"{row.operator} {row.case}"] = row.task(tuple(arms), self.asked.rounds)[1]
        if not any(list(each.compiles()) for each in requests.values()):
            return
        tasks: Sequence[Ahead] = [("compare", compile_ahead, [*requests.values()])]
        tasks = [*tasks, *((place, tune_ahead, each) for place, each in requests.items())]
        try:
            with self._within(self._left() / 2):
                while tasks:
                    tasks = self._ahead(tasks)
        except (Failed, Late):  # the GPU is lost, or half of the time is over
            return
        except WorkerError as error:
            self.bug = error

    def _ahead(self, tasks: Sequence[Ahead]) -> Sequence[Ahead]:
        """Run the tasks in one worker until a task fails; return the tasks after the failed one."""
        self.workers.coming, left = [None], iter(tasks)
        with closing(self.workers.take(None)) as worker:
            for place, task, argument in left:
                heard = _Heard(self.progress, place)
                try:
                    worker.ask(task, argument, patience=PATIENCE, progress=heard)
                except Failed as failed:
                    heard("", f"failed ahead of time: {failed.message}")
                    break
            else:
                return []
        self._expect_clean_gpu()
        return [*left]

    def _expect_time(self, turn: ProcessRow) -> None:
        """Raise OutOfTime if less time is left than the longest comparable session took.

        The comparable sessions are those of this row in this environment. If there are none, take the
        sessions in this environment with the same reference arm (all operators have one, and all layers
        another). If there are none of these either, take all sessions. A row that may take longer than the
        whole time limit starts only as the first row of this run."""
        row, left = turn.row, self._left()
        every = [s for s in self.results.sessions if s.arms]
        alike = [
            s for s in every if s.reference_arm == row.reference_arm and (UPSTREAM in s.arms) is turn.apart
        ]
        own = [s for s in alike if s.row == (row.operator, row.case)]
        warm = _place(turn) in self.measured
        longest = max((_seconds(s, warm=warm) for s in own or alike or every), default=0.0)
        if longest > left and (self.measured or longest <= self.asked.seconds):
            raise OutOfTime(
                f"{max(left, 0):.0f} s are left, and {row.operator} {row.case} may take {longest:.0f} s: "
                "repeat the command to continue"
            )

    def _left(self) -> float:
        return self.end - monotonic()

    def _within(self, seconds: float) -> AbstractContextManager[None]:
        """In the ``with`` block, kill a worker that takes longer than ``seconds``, and raise Late."""
        return deadline.until(None if math.isinf(seconds) else time.monotonic() + seconds)

    def _lacking(self, turn: ProcessRow) -> list[str]:
        """The arms that have no result yet. Our own kernels come first, while the most memory is free. The
        reference arm is listed only if it was requested and no other arm can be tried."""
        row, keys = turn.row, self._keys(turn.row)
        arms = [arm for arm in keys if (arm == UPSTREAM) is turn.apart and arm != row.reference_arm]
        if set(keys) == {row.reference_arm} <= set(self.asked.arms) and not turn.apart:
            arms = [row.reference_arm]
        lacking = [arm for arm in arms if not self._answered(turn, arm) and not self._outdone(turn, arm)]
        return sorted(lacking, key=lambda arm: arm not in OURS)

    def _answered(self, turn: ProcessRow, arm: str) -> bool:
        """Whether an arm with its current key has figures from this process, or a failure from any process. A
        failure counts for all processes, because the arm would fail again. A result does not count if the
        row, the reference arm or this arm changed afterwards, because no table shows such a result. A change
        counts even if it was undone later."""
        row, keys, found = turn.row, self._keys(turn.row), False
        for place, s in enumerate(self.results.sessions):
            if s.row != (row.operator, row.case):
                continue
            told = s.arms.get(arm) or s.failed.get(arm)
            reference_arm = s.arms.get(row.reference_arm)
            as_now = s.question == row.question and (
                not reference_arm or reference_arm.key == keys[row.reference_arm]
            )
            if not as_now or (told and told.key != keys[arm]):
                found = False
            elif arm in s.failed:
                found = found or place >= self.heeded
            elif told:
                found = found or s.process == turn.process
        return found

    def _outdone(self, turn: ProcessRow, arm: str) -> bool:
        """Whether an earlier process has shown another arm of the same column to be clearly faster, so that
        no table cell will show this arm."""
        row, keys = turn.row, self._keys(turn.row)
        column = next(column.arms for column in COLUMNS if arm in column.arms)
        for s in self.results.of(row.operator, row.case):
            if s.question == row.question and s.process < turn.process:
                now = [a for a in column if a in s.arms and s.arms[a].key == keys.get(a)]
                times = {a: median(s.arms[a].milliseconds) for a in now}
                if arm in times and times[arm] > BEHIND * min(times.values()):
                    return True
        return False

    def _keys(self, row: Row) -> dict[str, str]:
        name = row.operator, row.case
        if name not in self.keys:
            self.keys[name] = self._found_keys(row)
        return self.keys[name]

    def _found_keys(self, row: Row) -> dict[str, str]:
        """The key of each arm that can be tried, including the reference arm. This method also records in the
        results why each remaining arm cannot be tried."""
        keys, reasons = {}, {}
        for arm in (a for a in row.arms if a in self.asked.arms or a == row.reference_arm):
            found = keyed(row, arm, self.upstream, self.build)
            if isinstance(found, str):
                reasons[arm] = found
            else:
                keys[arm], self.versions[arm] = found
        gone = {arm: GONE for arm in (PROGRAM, EDITED) if arm in reasons}
        now = Present(question=row.question, keys=keys | gone)
        self.results = self.results.asked(row.operator, row.case, now, reasons)
        return keys

    def _run_session(self, turn: ProcessRow, arms: list[str]) -> None:
        """Run and store one session. If only the reference arm has figures, store only the other arms'
        failures. If the worker is lost during the timing, any arm may be the cause. So two more sessions
        follow, each with half of the arms."""
        row, keys, begun = turn.row, self._keys(turn.row), monotonic()
        found = self._answer(turn, arms)
        self.measured.add(_place(turn))
        answered = found["arms"] if set(found["arms"]) & set(arms) else {}
        versions = {name: number for a in answered for name, number in self.versions[a].items()}
        session = Session(
            operator=row.operator,
            case=row.case,
            sizes=dict(row.sizes),
            question=row.question,
            process=turn.process,
            reference_arm=row.reference_arm,
            roofline=round(row.least(self.machine.ceilings) * 1e3, 6),
            arms={a: ArmResult(key=keys[a], note=row.note(a), **told) for a, told in answered.items()},
            failed={a: ArmFailure(key=keys[a], reason=why) for a, why in found["failed"].items()},
            conditions={"gpu": self.machine.gpu, "ceilings": self.machine.ceilings}
            | found["conditions"]
            | {"versions": versions},
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(monotonic() - begun, 1),
        )
        if session.arms or session.failed:
            self.results = self.results.plus([session])
            self.keep(self.results)
        for half in found.get("halves", ()):
            self._run_session(turn, half)

    def _answer(self, turn: ProcessRow, arms: list[str]) -> dict[str, Any]:
        """Ask a worker to run the session, and return its answer. If an arm kills the worker, ask again
        without that arm, as long as other arms are left. Raises only errors that no arm caused. These are
        OutOfTime if more time might help, WorkerError if the worker could not start, and Failed if the GPU is
        lost."""
        row, left, failed = turn.row, list(arms), dict[str, str]()
        while left:
            beside = [arm for arm in left if arm != row.reference_arm]
            task, request = row.task((row.reference_arm, *beside), self.asked.rounds)
            place = (
                f"{row.operator} {row.case}, process {turn.process + 1}, {len(self.workers.coming)} to come"
            )
            heard = _Heard(self.progress, place, (PREPARING, row.reference_arm, *beside, TIMING))
            try:
                with (
                    self._within(self._left()),
                    closing(self.workers.take(self._python(turn))) as worker,
                ):
                    found = worker.ask(task, request, patience=PATIENCE, progress=heard)
            except Late:
                return {"arms": {}, "failed": failed | self._late(heard.last, left, turn), "conditions": {}}
            except (Failed, WorkerError) as error:
                if isinstance(error, Lost):
                    self._expect_clean_gpu()
                if isinstance(error, WorkerError) and not heard.last and not turn.apart:
                    raise
                if isinstance(error, Failed) and heard.last == TIMING and len(beside) > 1:
                    halves = beside[: len(beside) // 2], beside[len(beside) // 2 :]
                    return {"arms": {}, "failed": failed, "conditions": {}, "halves": halves}
                failed |= self._blamed(error, heard.last, left, turn)
                left = [arm for arm in left if arm not in failed]
            else:
                return found | {"failed": failed | found["failed"]}
        return {"arms": {}, "failed": failed, "conditions": {}}

    def _expect_clean_gpu(self) -> None:
        """After a worker is lost, check that the GPU still works; raise Failed if it does not."""
        with closing(self.workers.bare()) as fresh:
            fresh.ask(clean, None, patience=PATIENCE)

    def _late(self, last: str, left: list[str], turn: ProcessRow) -> dict[str, str]:
        """Return the reason for each arm that failed because the time ended. This is the running arm if it is
        in ``left``; otherwise all arms in ``left`` failed. Raises OutOfTime instead if earlier sessions used
        part of the time."""
        if self.measured or self.asked.spent:
            place = f"{turn.row.operator} {turn.row.case}"
            raise OutOfTime(f"the time ran out during {place}: repeat the command to continue")
        why = f"not ready within {self.asked.seconds:.0f} s; repeat with --again and more time"
        return {last: why} if last in left else dict.fromkeys(left, f"{last or PREPARING}: {why}")

    def _blamed(
        self, error: Failed | WorkerError, last: str, left: list[str], turn: ProcessRow
    ) -> dict[str, str]:
        """After an error, map each arm that failed to the reason. A bug in this program, or a worker that
        does not start, fails all arms in ``left``. After any other error, only the running arm failed if it
        is in ``left``; otherwise all arms failed."""
        if isinstance(error, WorkerError):
            last_line = str(error).strip().splitlines()[-1]
            if not last:
                why = f"no worker starts in its environment: {last_line}; run coda-agent compare --install"
                return dict.fromkeys(left, why)
            self.bug = self.bug or error
            return dict.fromkeys(left, f"a bug in this program, not in the arm: {last_line}")
        why = f"{error.code}: {error.message}" if isinstance(error, Lost) else error.message
        # with ``apart``, the reference arm does not fail, because it has figures from the current environment
        own = [] if turn.apart else [turn.row.reference_arm]
        if last in left:
            return {last: why}
        if last in ("", PREPARING, turn.row.reference_arm):
            place = f"{last or PREPARING}: " if isinstance(error, Lost) else ""
            return dict.fromkeys([*left, *own], f"{place}{why}")
        return dict.fromkeys(left, f"during the timing: {why}")


@dataclass
class _Heard:
    """A progress listener that remembers the running arm."""

    progress: Progress
    place: str
    stations: tuple[str, ...] = ()  # messages that name an arm or a stage
    last: str = ""

    def __call__(self, gate: str, words: str) -> None:
        self.last = words if words in self.stations else self.last
        self.progress(self.place, words)


def _place(turn: ProcessRow) -> tuple[str, str, bool]:
    return turn.row.operator, turn.row.case, turn.apart


def _seconds(session: Session, *, warm: bool) -> float:
    """An estimate of a session's duration in seconds. ``warm``: this run has already measured the row, so
    part of the preparation is cached."""
    prepared = sum(arm.seconds for arm in session.arms.values())
    return session.seconds - (CACHED * prepared if warm else 0.0)
