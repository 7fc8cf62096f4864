"""Summarize a run's journal by attempt.

An attempt consists of a report, the drafts and answers before the report, and the measurements after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from coda_agent.agent.providers import Turn
from coda_agent.agent.run.history import Past, attended, state_of
from coda_agent.agent.run.loop import extract
from coda_agent.agent.run.runs import JOURNAL
from coda_agent.agent.run.view import Judged, RunView
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import Event
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import Report, Timing
from coda_agent.verifier.spec.file import SpecError

# a summary also lists events of other kinds, but assigns them to no attempt
KINDS = ("prompt", "answer", "draft", "report", "piece", "measurement", "void")


@dataclass(frozen=True)
class Attempt:
    """One attempt with its source and verdict. ``report`` is None until the source is verified.

    ``timings`` exist even if the kernel was rejected as too slow. ``voids``: the reason for each invalid
    measurement of the kernel.
    """

    number: int
    turns: tuple[Turn, ...]
    drafts: tuple[Judged, ...]
    source: str
    report: Report | None
    timings: tuple[Timing, ...]
    voids: tuple[str, ...]

    @property
    def status(self) -> str:
        return self.report.status if self.report else "not judged yet"


@dataclass(frozen=True)
class Step:
    """An event, with its attempt (0 if none) and the seconds since the previous event."""

    event: Event
    attempt: int
    seconds: float


@dataclass(frozen=True)
class Account:
    """The summary of a run's journal so far. ``edited``: whether the spec in the run's folder has changed
    since the run started, or cannot be read."""

    past: Past
    header: Mapping[str, Any]
    spec: str
    edited: bool
    attempts: tuple[Attempt, ...]
    steps: tuple[Step, ...]


def read(directory: Path) -> Account:
    """Read a run's folder. The run may be open in another process. Raises JournalError."""
    journal = directory / JOURNAL
    header, events = record.glance(journal)
    yaml = directory / "spec.yaml"
    grouped = _grouped(events)
    judged = {f"report/{number}": attempt for number, attempt in RunView(events).attempts.items()}
    return Account(
        past=attended(state_of(directory.name, header, events), journal),
        header=header,
        spec=yaml.read_text(encoding="utf-8", errors="replace") if yaml.is_file() else "",
        edited=_edited(yaml, header),
        attempts=tuple(_attempt(judged, n, own) for n, own in sorted(grouped.items()) if n),
        steps=_steps(events, grouped),
    )


def _edited(yaml: Path, header: Mapping[str, Any]) -> bool:
    try:
        return load(yaml, check=False).hash != header["spec_hash"]
    except SpecError:
        return True


def _grouped(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The events by the number of their attempt. The first attempt has number 1. Number 0 has the prompt and
    all events whose kind is not in KINDS.

    The order of the events decides to which attempt an event belongs. The event's key cannot decide this,
    because a key names only an author's turn, and an attempt may take several turns.
    """
    grouped: dict[int, list[Event]] = {0: []}
    judged = 0
    for event in events:
        if event.kind == "prompt" or event.kind not in KINDS:
            place = 0
        elif event.kind in ("answer", "draft", "report"):
            place = judged + 1
        else:
            place = judged
        judged += event.kind == "report"
        grouped.setdefault(place, []).append(event)
    return grouped


def _steps(events: Sequence[Event], grouped: Mapping[int, Sequence[Event]]) -> tuple[Step, ...]:
    attempts = {event.seq: number for number, own in grouped.items() for event in own}
    times = [datetime.fromisoformat(event.time) for event in events]
    waits = [(now - before).total_seconds() for before, now in zip(times[:1] + times, times, strict=False)]
    return tuple(
        Step(event, attempts[event.seq], max(wait, 0.0))  # the clock may have been set back
        for event, wait in zip(events, waits, strict=True)
    )


def _attempt(judged: Mapping[str, Judged], number: int, own: Sequence[Event]) -> Attempt:
    turns = tuple(Turn.from_json(e.payload) for e in own if e.kind == "answer")
    source = (extract(turns[-1].text) or "") if turns else ""
    report = None
    for event in own:
        if event.kind == "report":
            report, source = judged[event.key].report, judged[event.key].source
    return Attempt(
        number=number,
        turns=turns,
        drafts=tuple(Judged(0, e.payload) for e in own if e.kind == "draft"),
        source=source,
        report=report,
        timings=record.timings_of(report),
        voids=tuple(str(e.payload["reason"]) for e in own if e.kind == "void"),
    )
