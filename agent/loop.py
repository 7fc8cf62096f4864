"""The loop: draft -> verify -> feed back, until accepted or out of attempts.

Every step goes through the journal, so a run that was killed at any moment and is started again takes
up where it was: an answer that was received is never asked for again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from agent import prompt
from agent.journal import Journal, JournalError
from agent.providers import Message, Provider, Turn, Usage
from primitives.ir import Program, ProgramError
from verifier.report import (
    MEASUREMENT,
    REPORT,
    Accepted,
    Authorship,
    Checked,
    Measurement,
    Rejected,
    Unmeasured,
    joined,
)
from verifier.spec import Spec
from verifier.verify import Verdict, check

if TYPE_CHECKING:
    from verifier.measure import Keep

OTHER_VERSION = "the run's journal was written by another version of coda-agent; start a new run"
PIECE = "piece"  # the kind of event that holds a part of a measurement
BLOCK = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
Measure = Callable[[Spec, Program, "Keep"], Measurement]


class Listener(Protocol):
    """Who watches a run: a live table, or plain lines."""

    def attempt(self, number: int, limit: int) -> None: ...
    def text(self, words: str) -> None: ...
    def gate(self, name: str, words: str) -> None: ...
    def report(self, number: int, report: Accepted | Checked | Rejected) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run stands: the last report, the source it is about, and what was spent."""

    report: Accepted | Checked | Rejected
    source: str
    program: Program | None
    authorship: Authorship
    usage: Usage


def extract(answer: str) -> str | None:
    """The last ```python block of an answer; None if there is none."""
    blocks = BLOCK.findall(answer)
    return blocks[-1] if blocks else None


@dataclass
class Loop:
    """One run: who writes, what judges, and where it is written down.

    ``measure`` runs the GPU gates here; None leaves a checked kernel awaiting measurement elsewhere.
    """

    journal: Journal
    spec: Spec
    text: str  # the spec's YAML, as the author sees it
    provider: Provider
    listener: Listener
    attempts: int = 6
    measure: Measure | None = None
    weak_jail: bool = False

    def run(self) -> Outcome:
        """Go on until a kernel is accepted, checked with nothing here to measure it, or attempts are
        used up. Raises ProviderError when there is no answer to be had, and JournalError."""
        first = self.journal.once("prompt", "prompt", self._prompt)
        messages = [Message("user", first["task"])]
        usage = Usage()
        for number in range(1, self.attempts + 1):
            self.listener.attempt(number, self.attempts)
            turn = self._answer(number, first["system"], messages)
            usage += turn.usage
            source = extract(turn.text) or ""
            report, program = self._judged(number, source)
            self.listener.report(number, report)
            outcome = Outcome(report, source, program, _authorship(self.journal, turn, number), usage)
            if not isinstance(report, Rejected):
                return outcome
            messages += [Message("assistant", turn.text), Message("user", prompt.feedback(report))]
        return outcome

    def _prompt(self) -> dict[str, Any]:
        assembled = prompt.assemble(self.spec, self.text)
        return {"system": assembled.system, "task": assembled.task}

    def _answer(self, number: int, system: str, messages: list[Message]) -> Turn:
        payload = self.journal.once(
            f"answer/{number}",
            "answer",
            lambda: self.provider.next_turn(system, messages, on_text=self.listener.text).to_json(),
        )
        return Turn.from_json(payload)

    def _judged(self, number: int, source: str) -> Verdict:
        """Check on this machine, then measure here, or take a measurement that was imported."""
        payload = self.journal.once(f"report/{number}", "report", lambda: self._check(source))
        report, program = _read(payload, self.spec)
        measurement = None
        if isinstance(report, Checked) and program is not None:
            measurement = self._measured(number, program)
        return Verdict(joined(report, measurement), program)

    def _check(self, source: str) -> dict[str, Any]:
        if not source:
            missing = Rejected(gate="trace", code="no_source", message="the answer holds no ```python block")
            return {"report": missing.model_dump(mode="json"), "program": None, "source": ""}
        report, program = check(self.spec, source, weak_jail=self.weak_jail, progress=self.listener.gate)
        return {
            "report": report.model_dump(mode="json"),
            "program": program.to_json() if program else None,
            "source": source,
        }

    def _measured(self, number: int, program: Program) -> Measurement | None:
        before = measurement({e.key: e.payload for e in self.journal.events()}, number)
        if before is not None or self.measure is None:
            return before
        pieces = Pieces.of(self.journal, number)
        found = self.measure(self.spec, program, pieces)
        if isinstance(found, Unmeasured):  # no verdict on the kernel: the next try starts from nothing
            self.journal.once(pieces.void, "void", lambda: found.model_dump(mode="json"))
        else:
            self.journal.once(f"measurement/{number}", "measurement", lambda: found.model_dump(mode="json"))
        return found


@dataclass(frozen=True)
class Pieces:
    """Finished pieces of a measurement, in the journal: one that was cut off goes on."""

    journal: Journal
    prefix: str
    void: str

    @classmethod
    def of(cls, journal: Journal, number: int) -> Pieces:
        """Those of attempt ``number``, since its last measurement that was void."""
        voids = sum(e.key.startswith(f"void/{number}/") for e in journal.events())
        return cls(journal, f"piece/{number}.{voids}/", f"void/{number}/{voids}")

    def load(self, piece: str) -> dict[str, Any] | None:
        key = self.prefix + piece
        return next((e.payload for e in self.journal.events() if e.key == key), None)

    def save(self, piece: str, found: dict[str, Any]) -> None:
        self.journal.once(self.prefix + piece, PIECE, lambda: found)


def standing(journal: Journal, spec: Spec) -> Outcome | None:
    """How a run stands by its journal: its last verified attempt, if there is one."""
    events = {e.key: e.payload for e in journal.events()}
    number = last_verified(events)
    if number is None:
        return None
    payload = events[f"report/{number}"]
    report, program = _read(payload, spec)
    turns = [Turn.from_json(events[f"answer/{n}"]) for n in range(1, number + 1)]
    usage = sum((t.usage for t in turns), Usage())
    final = joined(report, measurement(events, number))
    return Outcome(final, payload["source"], program, _authorship(journal, turns[-1], number), usage)


def _read(payload: dict[str, Any], spec: Spec) -> tuple[Accepted | Checked | Rejected, Program | None]:
    text = payload["program"]
    try:
        report = REPORT.validate_python(payload["report"])
        return report, Program.from_json(text, spec.signature()) if text else None
    except (ValidationError, ProgramError):
        raise JournalError(OTHER_VERSION) from None


def last_verified(events: Mapping[str, Any]) -> int | None:
    """The number of the last attempt with a report, by a run's payloads."""
    return max((int(key.partition("/")[2]) for key in events if key.startswith("report/")), default=None)


def measurement(events: Mapping[str, Any], number: int) -> Measurement | None:
    """What was measured of an attempt, by a run's payloads."""
    found = events.get(f"measurement/{number}")
    try:
        return MEASUREMENT.validate_python(found) if found else None
    except ValidationError:
        raise JournalError(OTHER_VERSION) from None


def _authorship(journal: Journal, turn: Turn, number: int) -> Authorship:
    """Who wrote what a run stands at; a replay's author is that of the run it replays."""
    run = journal.header.get("replays") or journal.header["run"]
    return Authorship(author=turn.author, attempts=number, run=str(run))
