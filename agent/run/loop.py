"""The loop of a run: an author writes a kernel, the gates verify the kernel, and the author gets the verdict.
The loop ends when a kernel is accepted or checked, or when attempts or budget are used up.

The journal records every step. So a run that was killed continues where it stopped, and never asks again for
an answer that it has received.
"""

from __future__ import annotations

import io
import itertools
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.agent.prompts import prompt
from coda_agent.agent.prompts.markdown_fences import PYTHON, last
from coda_agent.agent.providers import Message, OutOfBudget, Provider, ProviderError, Question, Turn, Usage
from coda_agent.agent.run import improve, tools
from coda_agent.agent.run.budget import BudgetLedger, Purse, RunLimits, Spent
from coda_agent.agent.run.task import Measure, Task
from coda_agent.agent.run.view import Judged, RunView
from coda_agent.agent.storage.gpu_lock import gpu_alone
from coda_agent.agent.storage.journal import GPU_SECONDS, Journal, JournalError, Record
from coda_agent.agent.storage.record import uncharged
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.system.deadline import Late, until
from coda_agent.verifier.report import (
    MEASUREMENT,
    Accepted,
    Authorship,
    Checked,
    Measurement,
    Rejected,
    Report,
    Unmeasured,
    joined,
)
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.verifier.incumbent import Incumbent

PIECE = "piece"  # the kind of event that holds one stage of a measurement
STOPPED = "stopped"  # the kind of event that says why a run ended early
CALLS = 12  # this many turns in a row may call tools without submitting; one more ends the attempt

# A function that holds a GPU for one measurement. If it must wait, it calls its first argument with the
# reason. Its second argument is the time (by ``time.monotonic``) at which waiting ends with TimeoutError.
Lease = Callable[[Callable[[str], object], float | None], AbstractContextManager[object]]


class Listener(Protocol):
    """An observer that shows a run, for example as a live table or as plain lines."""

    def attempt(self, number: int, limit: int) -> None: ...
    def text(self, words: str) -> None: ...
    def gate(self, name: str, words: str) -> None: ...
    def report(self, number: int, report: Report) -> None: ...
    def tool(self, name: str, words: str) -> None: ...
    def spent(self, spent: Spent) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The current result of a run: a report, the judged source, the kernel (if the source could be traced),
    and the usage so far. ``stopped``: why the run ended early; "" if the run did not end early."""

    report: Report
    source: str
    kernel: KernelSource | None
    authorship: Authorship
    usage: Usage
    stopped: str = ""


def extract(answer: str) -> str | None:
    """The last ```python block of an answer; None if the answer has none."""
    return last(answer, *PYTHON)


@dataclass
class Loop:
    """One run, with its author, its task and its journal.

    ``measure`` runs the GPU gates. If ``measure`` is None, this run only checks kernels, and another command
    must measure them.
    """

    journal: Journal
    spec: Spec
    task: Task
    provider: Provider
    listener: Listener
    attempts: int = 6
    measure: Measure | None = None
    limits: RunLimits = RunLimits()
    improve: int = 0  # number of rounds that try to speed up an accepted kernel
    purse: Purse | None = None  # None if no other run shares the limits
    gpu: Lease = gpu_alone

    def __post_init__(self) -> None:
        self.ledger = BudgetLedger(self.journal, self.limits, purse=self.purse)
        self.desk = tools.Tools(self.journal, self.spec, self._check)

    def run(self) -> Outcome:
        """Run until one of these happens: a kernel is accepted and its improvement rounds are over; a kernel
        is checked but not measured here; attempts or budget are used up; the provider fails. In an
        improvement round, a faster kernel replaces the accepted kernel. Raises JournalError. Raises
        ProviderError if the provider fails before a kernel is accepted. Raises OutOfBudget if the budget is
        used up before the first report."""
        first = self.opening()
        made = self._submissions()
        messages, limit = [Message("user", first.task)], max(self.attempts, made)
        outcome: Outcome | None = None
        kept: Outcome | None = None
        try:
            for number in itertools.count(1):
                self.listener.attempt(number, limit)
                turn, words = self._submitted(first.system, messages)
                outcome = self._judged(number, turn, kept)
                if isinstance(outcome.report, Checked):
                    return outcome
                if isinstance(outcome.report, Accepted):
                    limit = limit if kept else max(number + self.improve, made)
                    kept = outcome
                if number >= limit:
                    return _final(outcome, kept)
                messages.append(tools.results(turn, words, self._reply(outcome, limit - number)))
        except (OutOfBudget, ProviderError) as ended:
            self._stopped(str(ended))
            if outcome is None or (kept is None and isinstance(ended, ProviderError)):
                raise
            return _final(outcome, kept, str(ended))
        except KeyboardInterrupt:
            with suppress(JournalError):  # a full disk may have no space for the event
                self._stopped("interrupted")
            raise
        raise AssertionError("the number of attempts must be limited")

    def _submissions(self) -> int:
        """The number of recorded submissions. If the run was interrupted, the last one may not be judged
        yet."""
        number, unjudged = 0, False
        for event in self.journal.events():
            if event.kind == "answer":
                unjudged = tools.submits(Turn.from_json(event.payload))
            elif event.kind == "report":
                number, unjudged = number + 1, False
        return number + unjudged

    def _stopped(self, reason: str, charge: Mapping[str, float] | None = None) -> None:
        """Record why the run ends early. ``charge``: the cost of interrupted work. The run can be resumed."""
        number = 1 + sum(event.kind == STOPPED for event in self.journal.events())
        self.journal.once(f"{STOPPED}/{number}", STOPPED, lambda: {"reason": reason, **(charge or {})})

    def _reply(self, outcome: Outcome, left: int) -> str:
        if isinstance(outcome.report, Rejected):
            return prompt.feedback(outcome.report)
        assert isinstance(outcome.report, Accepted) and outcome.kernel is not None
        return self.task.accepted(outcome.report, outcome.kernel.program, left)

    def opening(self) -> prompt.Prompt:
        """The prompt as it was when the run started. Lessons that were learned later are not added."""
        made = self.journal.once("prompt", "prompt", lambda: asdict(self.task.opening()))
        return prompt.Prompt(made["system"], made["task"])

    def _submitted(self, system: str, messages: list[Message]) -> tuple[Turn, dict[str, str]]:
        """Ask for turns until a turn submits a source. Return this turn, and the results of its other tool
        calls. Append every turn to ``messages``. Before asking again, also append the results of the turn's
        tool calls. After ``CALLS`` turns that only called tools, return the next turn in any case."""
        for used in range(1 + CALLS):
            say, deadline, run = self.listener.text, self.ledger.deadline, self.journal.path.parent
            question = Question(system, messages, tools.TOOLS, self.ledger, say, deadline, run)
            turn = self._answer(question)
            words = self._used(question.number, turn)
            messages.append(Message("assistant", turn.text, turn.blocks))
            if tools.submits(turn) or used == CALLS:
                break
            messages.append(tools.results(turn, words))
        return turn, words

    def _answer(self, question: Question) -> Turn:
        number = self.ledger.turn = question.number

        def ask() -> dict[str, Any]:
            self.ledger.afford()
            try:
                turn = self.provider.next_turn(question)
            except ProviderError:
                self.ledger.timely()  # raises OutOfBudget if the author's tools used up the time
                raise
            return turn.to_json() | self.ledger.answered(turn)

        try:
            turn = Turn.from_json(self.journal.once(f"answer/{number}", "answer", ask))
        finally:
            self.ledger.close_turn()
        self.listener.spent(self.ledger.spent())
        return turn

    def _used(self, number: int, turn: Turn) -> dict[str, str]:
        """The results of a turn's tool calls by id."""
        words = {}
        for position, call in enumerate(turn.calls, 1):
            if call.name != tools.SUBMIT.name:
                words[call.id] = self.desk.answer(f"{number}.{position}", call)
                self.listener.tool(call.name, words[call.id])
        return words

    def _judged(self, number: int, turn: Turn, kept: Outcome | None) -> Outcome:
        """Check the source that a turn submitted. If the source passes, measure its kernel, or use a
        measurement that was imported."""
        submitted = tools.submission(turn)
        source = extract(turn.text) or "" if submitted is None else submitted
        # an author may set schedules only after a kernel was accepted, or when editing an accepted kernel
        text = turn.text if kept or self.task.edits else ""
        payload = self.journal.once(f"report/{number}", "report", lambda: self._check(source, text))
        judged = Judged(number, payload)
        kernel, found = judged.kernel(self.spec), None
        if isinstance(judged.checked, Checked) and kernel is not None:
            found = self._measured(number, kernel, kept)
        final = joined(judged.checked, found)
        self.listener.report(number, final)
        usage = RunView(self.journal.events()).usage
        return Outcome(final, source, kernel, _authorship(self.journal, turn, number), usage)

    def _check(self, source: str, schedules: str = "") -> dict[str, Any]:
        if not source:
            missing = Rejected(gate="trace", code="no_source", message="the answer holds no ```python block")
            return {"report": missing.model_dump(mode="json"), "program": None, "source": ""}
        try:
            given = improve.schedules(schedules)
        except ProgramError as error:
            refused = Rejected(gate="trace", code=error.code, message=error.message)
            return {"report": refused.model_dump(mode="json"), "program": None, "source": source}
        with self._timely():
            report, program = self.task.check(source, given, self.listener.gate)
        made = {
            "report": report.model_dump(mode="json"),
            "program": program.to_json() if program else None,
            "source": source,
        }
        return made | {"raw": source} if self.task.edits else made

    @contextmanager
    def _timely(self) -> Iterator[None]:
        """When the time is up, interrupt the gates in the ``with`` block, and raise OutOfBudget. The attempt
        then has no verdict."""
        try:
            with until(self.ledger.deadline):
                yield
        except Late:
            raise self.ledger.late() from None

    @contextmanager
    def _gpu(self) -> Iterator[None]:
        """Hold the GPU for this process alone. Raises OutOfBudget if time runs out before the GPU is free."""
        self.ledger.afford_gpu()
        with ExitStack() as stack:
            try:
                say = self.listener.text
                stack.enter_context(self.gpu(lambda words: say(f"{words}\n"), self.ledger.deadline))
            except TimeoutError:
                self.ledger.timely()
                raise
            yield

    def _measured(self, number: int, kernel: KernelSource, kept: Outcome | None) -> Measurement | None:
        attempts = RunView(self.journal.events()).attempts
        if again := _rejected_before(attempts, number):
            self.listener.text("this kernel was measured and rejected before; it is not measured again\n")
            self.journal.once(f"measurement/{number}", "measurement", lambda: again)
            return MEASUREMENT.validate_python(again)
        before = attempts[number].measurement
        if before is not None or self.measure is None:
            return before
        rival, pieces = as_incumbent(kept) if kept else self.task.rival(), None
        try:
            with self._gpu():
                self.ledger.afford_gpu()
                pieces = JournalPieces.of(self.journal, number)
                with self._timely():
                    found = self.measure(self.spec, kernel, pieces, rival)
                payload = found.model_dump(mode="json") | pieces.charge()
        except OutOfBudget as ended:  # the checked kernel can be measured later, or on another machine
            self.listener.text(f"not measured: {ended}\n")
            self._stopped(f"not measured: {ended}", pieces.charge() if pieces else {})
            return None
        if isinstance(found, Unmeasured):  # no verdict, so the next measurement starts over
            self.journal.once(pieces.void, "void", lambda: payload)
        else:
            self.journal.once(f"measurement/{number}", "measurement", lambda: payload)
        return found


def _rejected_before(attempts: Mapping[int, Judged], number: int) -> dict[str, Any] | None:
    """The measurement of an earlier attempt that rejected the same kernel against the same incumbent (the
    kernel to beat). None if there is no such measurement, or if attempt ``number`` was measured. A rejected
    kernel is not measured again, because a slow kernel that is measured often enough may win by chance."""
    attempt = attempts[number]
    if attempt.measured:
        return None
    for earlier in sorted((n for n in attempts if n < number), reverse=True):
        other = attempts[earlier]
        if other.accepted:  # the incumbent changed after that attempt
            return None
        alike = attempt.program_text == other.program_text and _same(attempt.edited, other.edited)
        if other.measured and alike:
            return dict(other.measured)
    return None


def _same(text: str | None, other: str | None) -> bool:
    """Whether two edited CuTeDSL texts are equal except for comments and white space. Two None are equal."""
    return text == other or bool(text and other and _tokens(text) == _tokens(other))


def _tokens(text: str) -> list[str]:
    """The tokens of a text, without comments, blank lines and indentation. A model wrote the text, so it is
    only tokenized and never compiled."""
    passed = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT)
    return [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in passed]


def _final(outcome: Outcome, kept: Outcome | None, stopped: str = "") -> Outcome:
    """The result of an ended run: its accepted kernel, or else its last attempt, with the usage of all
    attempts."""
    return replace(kept or outcome, usage=outcome.usage, stopped=stopped)


@dataclass
class JournalPieces:
    """The finished stages of a measurement, stored in the journal so that an interrupted measurement can
    continue. Each stage is charged for the GPU's time since the previous stage, so a killed run loses at most
    the charge of one stage."""

    journal: Journal
    prefix: str
    void: str
    since: float  # by time.monotonic

    @classmethod
    def of(cls, journal: Journal, number: int) -> JournalPieces:
        """The stages of attempt ``number`` since its last invalid measurement."""
        voids = sum(e.key.startswith(f"void/{number}/") for e in journal.events())
        return cls(journal, f"piece/{number}.{voids}/", f"void/{number}/{voids}", time.monotonic())

    def load(self, piece: str) -> dict[str, Any] | None:
        found = self.journal.get(self.prefix + piece)
        return uncharged(found) if found is not None else None

    def known(self) -> dict[str, dict[str, Any]]:
        """All stages by name."""
        own = (event for event in self.journal.events() if event.key.startswith(self.prefix))
        return {event.key.removeprefix(self.prefix): uncharged(event.payload) for event in own}

    def save(self, piece: str, found: dict[str, Any]) -> None:
        self.journal.once(self.prefix + piece, PIECE, lambda: found | self.charge())

    def charge(self) -> dict[str, float]:
        """The GPU seconds since the last charge, as the field of an event."""
        before, self.since = self.since, time.monotonic()
        return {GPU_SECONDS: round(self.since - before, 3)}


def result_of(journal: Record, spec: Spec) -> Outcome | None:
    """A run's result according to its journal: its last accepted kernel, or else its last verified attempt;
    None if no attempt was verified."""
    run = RunView(journal.events())
    at = run.standing
    if at is None:
        return None
    authorship = _authorship(journal, run.turns[-1], at.number)
    return Outcome(at.report, at.source, at.kernel(spec), authorship, run.usage)


def as_incumbent(outcome: Outcome) -> Incumbent:
    """The incumbent (the kernel that a change has to beat), made from an accepted kernel and its
    schedules."""
    from coda_agent.verifier.incumbent import Incumbent

    assert isinstance(outcome.report, Accepted) and outcome.kernel is not None
    return Incumbent.of(outcome.kernel, outcome.report.timings)


def _authorship(journal: Record, turn: Turn, number: int) -> Authorship:
    """The author, number and run of an attempt. For a replay, the run is the recorded run."""
    run = journal.header.get("replays") or journal.header["run"]
    return Authorship(author=turn.author, attempts=number, run=str(run))
