"""A typed view of a run's events: ``RunView(events).attempts[n].report``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coda_agent.agent.providers import Turn, Usage
from coda_agent.agent.storage.journal import Event
from coda_agent.agent.storage.record import uncharged
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.report import (
    MEASUREMENT,
    REPORT,
    Measurement,
    Report,
    joined,
)
from coda_agent.verifier.spec.model import Spec


@dataclass(frozen=True)
class Judged:
    """An attempt or a draft, with its report. ``number``: the attempt's number, which starts at 1; 0 for a
    draft. ``payload``: the payload of the event with the report. ``measured``: the payload of the measurement
    event, without the charged GPU seconds; None if nothing was measured."""

    number: int
    payload: Mapping[str, Any]
    measured: Mapping[str, Any] | None = None

    @property
    def source(self) -> str:
        return str(self.payload["source"])

    @property
    def edited(self) -> str | None:
        """The CuTeDSL that the author edited; None if the answer is a kernel file."""
        return self.payload.get("raw") or None

    @property
    def program_text(self) -> str | None:
        return self.payload["program"]

    def kernel(self, spec: Spec) -> KernelSource | None:
        if not self.program_text:
            return None
        return KernelSource(Program.from_json(self.program_text, spec.signature()), edited=self.edited)

    @cached_property
    def checked(self) -> Report:
        """The report of the gates that come before the measurement."""
        return REPORT.validate_python(self.payload["report"])

    @cached_property
    def measurement(self) -> Measurement | None:
        return MEASUREMENT.validate_python(self.measured) if self.measured else None

    @property
    def accepted(self) -> bool:
        return self.measured is not None and self.measured["status"] == "measured"

    @property
    def report(self) -> Report:
        """The whole report, including the measurement if there is one."""
        return joined(self.checked, self.measurement)


class RunView:
    """A run's ``turns`` in order, and its ``attempts`` by number."""

    def __init__(self, events: Iterable[Event]):
        payloads = {event.key: event.payload for event in events}
        self.turns = [Turn.from_json(p) for key, p in payloads.items() if key.startswith("answer/")]
        self.attempts: dict[int, Judged] = {}
        for key, payload in payloads.items():
            kind, _, number = key.partition("/")
            if kind == "report":
                measured = uncharged(payloads.get(f"measurement/{number}", {}))
                self.attempts[int(number)] = Judged(int(number), payload, measured or None)

    @property
    def usage(self) -> Usage:
        return sum((turn.usage for turn in self.turns), Usage())

    @property
    def last(self) -> Judged | None:
        """The last attempt."""
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def standing(self) -> Judged | None:
        """The attempt that is the run's result: the last accepted attempt, or else the last attempt."""
        accepted = [number for number, attempt in self.attempts.items() if attempt.accepted]
        return self.attempts[max(accepted)] if accepted else self.last
