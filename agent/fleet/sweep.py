"""A sweep: many runs under one budget, on the slots of an executor.

A sweep's folder has its own journal, which records the sweep's runs, compiled programs and every lease of a
slot (a core or a GPU). Answers, verdicts and costs are in the runs' own journals. Only the driver writes
journals; a slot only returns results. Therefore, if the driver is killed, a node is lost or the cluster is
replaced, only the work in progress is lost.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coda_agent.agent.fleet.executor import CPU
from coda_agent.agent.run import runs
from coda_agent.agent.storage.journal import Event, Journal, JournalError, glance
from coda_agent.primitives.lang.ir import Program

JOURNAL = runs.SWEEP
NAME = re.compile(r"sweep-\d{8}-\d{6}(-\d+)?")


@dataclass
class Sweep:
    """A sweep that is open in this process. Until it is closed, no other process can open the same sweep."""

    name: str
    journal: Journal
    session: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _number: int = 0
    _flights: dict[str, threading.Lock] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @property
    def header(self) -> Mapping[str, Any]:
        return self.journal.header

    def runs(self) -> list[str]:
        """The names of the sweep's runs, in the order in which the runs start."""
        return members(self._events())

    def record(self, kind: str, payload: dict[str, Any]) -> None:
        """Add an event to the journal, with its time since this process opened the sweep."""
        with self._lock:
            self._number += 1
            key = f"{kind}/{self.session}.{self._number}"
            self.journal.once(
                key,
                kind,
                lambda: payload | {"session": self.session, "at": round(time.monotonic() - self._began, 3)},
            )

    def once(self, key: str, kind: str, produce: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Like ``Journal.once``, but safe for threads: only one thread does the work for a key."""
        with self._lock:
            flight = self._flights.setdefault(key, threading.Lock())
        with flight:
            with self._lock:
                known = self.journal.get(key)
            if known is not None:
                return known
            made = produce()
            with self._lock:
                return self.journal.once(key, kind, lambda: made)

    def kind(self) -> str:
        """The model of the sweep's GPUs; "" until a GPU has joined."""
        joined = (event.payload["kind"] for event in self._events() if event.kind == "joined")
        return next((kind for kind in joined if kind != CPU), "")

    def left_out(self) -> dict[str, str]:
        """The excluded slots, each with the reason."""
        left: dict[str, str] = {}
        for event in self._events():
            if event.kind == "left" and event.payload["stays_out"]:
                left[event.payload["slot"]] = event.payload["reason"]
            elif event.kind == "readmitted":
                left.pop(event.payload["slot"], None)
        return left

    def _events(self) -> list[Event]:
        with self._lock:
            return self.journal.events()

    def close(self) -> None:
        with self._lock:
            self.journal.close()


def members(events: Sequence[Event]) -> list[str]:
    """The names of the runs in a sweep's events."""
    return [event.payload["run"] for event in events if event.kind == "run"]


def is_sweep(name: str) -> bool:
    """Whether the name belongs to a sweep and not to a run."""
    name = Path(name).name
    return bool(NAME.fullmatch(name)) and runs.has_journal(runs.runs_dir() / name, JOURNAL)


def create(header: Mapping[str, Any]) -> Sweep:
    """Create a sweep. Raises JournalError."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        name = f"sweep-{stamp}{suffix}"
        if not (runs.runs_dir() / name).exists():
            break
    journal = Journal.create(runs.runs_dir() / name / JOURNAL, {"run": name, "spec": "sweep", **header})
    return Sweep(name, journal, session=1)


def reopen(name: str) -> Sweep:
    """Open a sweep. Raises JournalError if the sweep is open in another process."""
    name = Path(name).name
    journal = Journal.open(runs.runs_dir() / name / JOURNAL)
    sessions = [event.payload.get("session", 0) for event in journal.events()]
    return Sweep(name, journal, session=1 + max(sessions, default=0))


def read(name: str) -> tuple[dict[str, Any], list[Event]]:
    """The header and events of a sweep, which may still be running. Raises JournalError."""
    path = runs.runs_dir() / Path(name).name / JOURNAL
    if not path.is_file():
        raise JournalError(f"{path}: there is no such sweep; check its name")
    return glance(path)


def compile_key(spec_hash: str, program: Program) -> str:
    """The journal's key for the compilation of a program. The key is a hash of the program, its schedules and
    the spec. It includes the spec, because the spec's cases fix static sizes."""
    what = json.dumps([spec_hash, program.to_json()])
    return f"compile/{hashlib.sha256(what.encode()).hexdigest()}"
