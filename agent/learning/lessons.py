"""Find the lessons in a run's journal. A lesson comes from a failure that a later attempt or draft fixed,
from a change that made a kernel no faster, or from a tip that the author proposed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

from coda_agent.agent.run.optimize import Original
from coda_agent.agent.run.runs import JOURNAL, folder
from coda_agent.agent.run.view import Judged, RunView
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import Event
from coda_agent.agent.tips import CUTEDSL, VOCABULARY, Lesson, TipsError, one_line
from coda_agent.verifier.decision import NO_FASTER
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import REPORT, Accepted, Rejected, Report

PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels")
SOURCES = ("report", "draft")  # kinds of events that judge a source
UNSEEN = "by its author's word alone"


@dataclass(frozen=True)
class FixedFailure:
    """A rejected source, and how to fix it. ``failed``: the gate and reason of the rejection. ``fix``: the
    difference to a later source that passed the gate. If a change was no faster and no later source passed,
    ``fix`` is the difference to the code to beat."""

    spec: str
    failed: str
    fix: str
    versions: str
    level: str = VOCABULARY

    def teaches(self, lesson: str) -> Lesson:
        """A lesson with the text ``lesson`` and with this failure as evidence. Raises TipsError for a text
        that must not enter a prompt."""
        return Lesson(lesson.strip(), self.spec, self.failed, self.fix, self.versions, self.level)


@dataclass(frozen=True)
class ProposedLesson:
    """A tip in the words of the run's author, with the failure that taught it."""

    lesson: str
    failure: FixedFailure


@dataclass(frozen=True)
class RunLessons:
    """All lessons of a run. ``told``: the tips that the author proposed. A tip may be about one of
    ``failures``."""

    run: str
    failures: tuple[FixedFailure, ...]
    told: tuple[ProposedLesson, ...]

    def untold(self) -> tuple[FixedFailure, ...]:
        """Failures for which the author proposed no tip."""
        named = {told.failure.failed for told in self.told}
        return tuple(failure for failure in self.failures if failure.failed not in named)

    def named(self, failed: str | None) -> FixedFailure:
        """The failure for ``failed`` (gate/reason); by default the run's only failure. Raises TipsError if no
        failure fits, or if several fit."""
        fitting = [failure for failure in self.failures if failed in (None, failure.failed)]
        if len(fitting) == 1:
            return fitting[0]
        known = ", ".join(failure.failed for failure in self.failures) or "none"
        what = "no single failure" if failed is None else f"no single failure {failed!r}"
        raise TipsError(
            f"run {self.run}: there is {what} that was fixed; name one with --failed; there are: {known}"
        )


def learned(name: str) -> RunLessons:
    """A run's lessons, according to its journal so far. Raises JournalError."""
    directory = folder(name)
    header, events = record.glance(directory / JOURNAL)
    level = CUTEDSL if "optimizes" in header else VOCABULARY
    judged = list(_judged_sources(events))
    versions = _versions(events)
    mended = _failures(header["spec"], versions, judged, _began_with(directory, events))
    failures = tuple(replace(failure, level=level) for failure in mended)
    spoken = [event.payload for event in events if event.kind == "tip"]
    told = tuple(_proposed(said, header["spec"], versions, failures, level) for said in spoken)
    return RunLessons(directory.name, failures, told)


def _judged_sources(events: Sequence[Event]) -> Iterator[tuple[Report, str]]:
    """The reports of drafts and attempts with their sources, in order. An attempt's report includes its
    measurement."""
    attempts = {f"report/{number}": attempt for number, attempt in RunView(events).attempts.items()}
    for event in events:
        if event.kind in SOURCES:
            judged = attempts.get(event.key) or Judged(0, event.payload)  # a draft is not an attempt
            yield judged.report, judged.source


def _began_with(directory: Path, events: Sequence[Event]) -> str | None:
    """The code of the original kernel that a run edits; None if the run does not edit a kernel."""
    found = next((event.payload for event in events if event.kind == "base"), None)
    if found is None:
        return None
    spec = load(directory / "spec.yaml", check=False)
    record.check_programs(directory / JOURNAL, events, spec)
    return Original.from_json(found, spec).kernel.text


def _failures(
    spec: str, versions: str, judged: Sequence[tuple[Report, str]], best: str | None
) -> Iterator[FixedFailure]:
    """For each gate/reason, the last rejection that has a fix. The fix is the difference to the next source
    that passed the gate. If a change was no faster and no later source passed, the fix is the difference to
    the code to beat. That code is the last source that was accepted before the change, or ``best`` if no
    source was accepted."""
    found: dict[str, FixedFailure] = {}
    for index, (report, source) in enumerate(judged):
        if isinstance(report, Accepted):
            best = source
        if isinstance(report, Rejected):
            after = next((text for later, text in judged[index + 1 :] if _passed(later, report.gate)), None)
            if report.code == NO_FASTER:
                after = after or best
            if after is not None:
                failed = f"{report.gate}/{report.code}"
                found[failed] = FixedFailure(spec, failed, changed(source, after), versions)
    yield from found.values()


def _passed(report: Report, gate: str) -> bool:
    """Whether a source passed a gate. A source that did not reach the gate did not pass it."""
    return any(passed.gate == gate for passed in report.gates)


def changed(before: str, after: str) -> str:
    """The lines that a fix removed and added, joined to one line, without indentation, comments and blank
    lines."""
    old, new = (
        [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        for text in (before, after)
    )
    # skip the two lines with file names
    lines = [line for line in unified_diff(old, new, n=0, lineterm="")][2:]
    return one_line(" ".join(f"{line[0]}`{line[1:]}`" for line in lines if not line.startswith("@@")))


def _versions(events: Sequence[Event]) -> str:
    """The versions of PACKAGES in the last report that is not a rejection; "unknown" if there is none."""
    for event in reversed(events):
        if event.kind in SOURCES:
            report = REPORT.validate_python(event.payload["report"])
            if not isinstance(report, Rejected):
                known = report.identity.versions
                return ", ".join(f"{name} {known[name]}" for name in PACKAGES if name in known) or "unknown"
    return "unknown"


def _proposed(
    payload: dict[str, Any], spec: str, versions: str, failures: Sequence[FixedFailure], level: str
) -> ProposedLesson:
    """A tip that the author proposed, with its failure. If the tip names one of ``failures``, the tip is
    about that failure. Otherwise the author's own words describe the failure."""
    lesson, said, fix = (str(payload[name]).strip() for name in ("lesson", "failed", "fix"))
    words = set(_words(said))
    known = next((f for f in failures if words.issuperset(_words(f.failed))), None)
    failed = known.failed if known else f"{one_line(said, 100)} ({UNSEEN})"
    mended = one_line(fix or (known.fix if known else ""))
    return ProposedLesson(lesson, FixedFailure(spec, failed, mended, versions, level))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)
