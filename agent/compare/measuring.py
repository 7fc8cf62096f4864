"""Measuring a comparison: what its results lack, a sitting at a time, each kept as soon as it is over.

A sitting is asked of a GPU worker. One that takes its worker along is repeated without the arm that was at
work; a column that cannot run says so in its cell, and stops nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from agent.compare import environment
from agent.compare.results import Arm, Failure, Results, Sitting
from agent.compare.rows import Row
from primitives.lower import lower
from verifier.columns import COLUMNS, UPSTREAM
from verifier.contest import Contender, machine
from verifier.gates import Progress, silent
from verifier.gpu import Lost, Worker
from verifier.measure import PATIENCE

PACKAGES = {arm: column.packages for column in COLUMNS for arm in column.arms}

Keep = Callable[[Results], object]


@dataclass(frozen=True)
class Asked:
    """What to measure: rows, arms of the columns, in how many processes, at most how many rounds in each."""

    rows: tuple[Row, ...]
    arms: tuple[str, ...]
    processes: int
    rounds: int


def measure(asked: Asked, results: Results, keep: Keep, progress: Progress = silent) -> Results:
    """``results`` with what they lacked; ``keep`` gets them after each sitting. ``progress`` hears of rows
    and arms. Raises what a worker raises for our own bugs, and ``Lost`` where the anchor does not run."""
    measuring = _Measuring(asked, results, keep, progress)
    try:
        measuring.run()
    finally:
        measuring.workers.close()
    return measuring.results


@dataclass
class _Workers:
    """By environment: this one (None), and CODA's own."""

    started: dict[str | None, Worker] = field(default_factory=dict)

    def of(self, python: str | None) -> Worker:
        if python not in self.started:
            self.started[python] = Worker(python=python) if python else Worker()
        return self.started[python]

    def close(self, *pythons: str | None) -> None:
        """Those, or all."""
        for python in pythons or tuple(self.started):
            if python in self.started:
                self.started.pop(python).close()


@dataclass
class _Measuring:
    asked: Asked
    results: Results
    keep: Keep
    progress: Progress
    workers: _Workers = field(default_factory=_Workers)
    tried: set[tuple[str, str, str]] = field(default_factory=set)  # that failed: not in every process again
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # by arm

    def run(self) -> None:
        self.machine = self.workers.of(None).ask(machine, None, patience=PATIENCE)
        upstream = environment.python()
        for process in range(self.asked.processes):
            for row in self.asked.rows:
                keys = self._keys(row, upstream)
                for python, here in ((None, False), (upstream, True)):
                    arms = [a for a in keys if (a == UPSTREAM) is here and self._lacks(row, process, a, keys)]
                    if arms:
                        self._seat(row, process, python, [a for a in arms if a != row.anchor], keys)
            self.workers.close()  # the next process is a fresh one

    def _keys(self, row: Row, upstream: str | None) -> dict[str, str]:
        """What each arm is that can be tried, the anchor among them; the results get why others cannot be."""
        keys, reasons = {}, {}
        for arm in (a for a in row.arms if a in self.asked.arms or a == row.anchor):
            if why := row.absent(arm):
                reasons[arm] = why
                continue
            versions = _versions(arm, upstream)
            if isinstance(versions, str):
                reasons[arm] = versions
                continue
            self.versions[arm] = versions
            parts = [f"{name} {number}" for name, number in versions.items()]
            keys[arm] = ", ".join([*parts, *map(_text, row.made_of(arm)), self.machine["gpu"]])
        known = {a: why for a, why in self.results.absent.get(row.operator, {}).items() if a not in keys}
        absent = self.results.absent | {row.operator: known | reasons}
        self.results = self.results.model_copy(update={"absent": absent})
        return keys

    def _lacks(self, row: Row, process: int, arm: str, keys: Mapping[str, str]) -> bool:
        if (row.operator, row.case, arm) in self.tried:
            return False
        return not any(
            s.process == process
            and s.question == row.question
            and all(a in s.arms and s.arms[a].key == keys[a] for a in (arm, row.anchor))
            for s in self.results.of(row.operator, row.case)
        )

    def _seat(
        self, row: Row, process: int, python: str | None, arms: list[str], keys: Mapping[str, str]
    ) -> None:
        """One sitting, kept."""
        failed: dict[str, str] = {}
        found = self._sat(row, process, python, arms, failed)
        failed |= found["failed"]
        self.tried |= {(row.operator, row.case, arm) for arm in failed}
        versions = {name: number for a in found["arms"] for name, number in self.versions[a].items()}
        sitting = Sitting(
            operator=row.operator,
            case=row.case,
            sizes=dict(row.sizes),
            question=row.question,
            process=process,
            anchor=row.anchor,
            roofline=round(row.least(self.machine["ceilings"]) * 1e3, 6),
            arms={a: Arm(key=keys[a], note=row.note(a), **told) for a, told in found["arms"].items()},
            failed={a: Failure(key=keys[a], reason=why) for a, why in failed.items()},
            conditions=found["conditions"] | {"ceilings": self.machine["ceilings"], "versions": versions},
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.results = self.results.plus([sitting])
        self.keep(self.results)

    def _sat(
        self, row: Row, process: int, python: str | None, arms: list[str], failed: dict[str, str]
    ) -> dict[str, Any]:
        """What a worker says of it; again without an arm that takes the worker along: ``failed`` has that."""
        left = list(arms)
        while True:
            task, seats = row.task((row.anchor, *left), self.asked.rounds)
            heard = _Heard(self.progress, f"{row.operator} {row.case}, process {process + 1}")
            try:
                return self.workers.of(python).ask(task, seats, patience=PATIENCE, progress=heard)
            except Lost as lost:
                self.workers.close(python)
                if heard.last == row.anchor or not left:
                    raise
                blamed = [heard.last] if heard.last in left else left  # all, where it happened on the clock
                failed |= dict.fromkeys(blamed, f"{lost.code}: {lost.message}")
                left = [arm for arm in left if arm not in failed]


@dataclass
class _Heard:
    """Passes progress on, and remembers which arm was at work."""

    progress: Progress
    place: str
    last: str = ""

    def __call__(self, gate: str, words: str) -> None:
        self.last = words
        self.progress(self.place, words)


def _versions(arm: str, upstream: str | None) -> dict[str, str] | str:
    """Of the packages that an arm is; or what to do about one that is missing."""
    packages = PACKAGES[arm]
    if arm == UPSTREAM:
        if upstream is None:
            return "it has no environment of its own: coda-agent compare --install"
        return environment.versions(upstream, packages)
    try:
        return {name: version(name) for name in packages}
    except PackageNotFoundError as error:
        return f"{error.name} is not installed: pip install {error.name}"


def _text(kernel: Contender) -> str:
    chosen = json.dumps(sorted((kernel.schedules or kernel.known or {}).items()))
    schedules = hashlib.sha256(chosen.encode()).hexdigest()[:8]
    return f"text {lower(kernel.program, kernel.raw).hash[:16]} on schedules {schedules}"
