"""Validate a run's journal or export before any other code reads it.

A journal may be damaged, edited by hand or written by another version. Other code reads runs' journals only
through ``glance``, ``opened`` and ``read_recording``. The headers and payloads that these functions return
have the shapes defined below. Events of unknown kinds are returned too, after fewer checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from coda_agent.agent.storage import journal
from coda_agent.agent.storage.journal import GPU_SECONDS, DamagedError, Event, Journal
from coda_agent.primitives.errors import first_fault
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule, by_step
from coda_agent.verifier.decision import BASELINE
from coda_agent.verifier.report import (
    MEASUREMENT,
    REPORT,
    Accepted,
    Measured,
    Measurement,
    Moment,
    Rejected,
    Report,
    Timing,
    Unmeasured,
    joined,
)
from coda_agent.verifier.spec.model import Spec

OTHER_VERSION = (
    "damaged, or written by another version of coda-agent: restore it from a copy, or start a new run"
)

Count = Annotated[int, Field(ge=0, lt=1 << 50, strict=True)]
Amount = Annotated[float, Field(ge=0, lt=1e12, strict=True)]


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class _Only(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Limits(_Only):
    tokens: Count = 0
    dollars: Amount = 0
    gpu_seconds: Amount = 0
    seconds: Amount = 0


class _Recorded(_Shape):
    """The header of a recording (an exported run): run, spec and author."""

    run: str
    spec: str
    author: str | None


class _Header(_Recorded):
    """The header of a run, with all options that are needed to resume the run."""

    spec_hash: str
    provider: str
    attempts: Annotated[int, Field(ge=1, lt=1 << 20, strict=True)]
    improve: Annotated[int, Field(ge=0, lt=1 << 20, strict=True)] = 0
    limits: _Limits = _Limits()
    replays: str | None = None
    optimizes: str = ""
    derived: str = ""
    proposes: str = ""
    measures_tip: str = ""
    without_tips: list[str] = []
    with_tips: list[str] = []
    model: str | None
    directory: str | None
    time_limit: Amount | None
    max_tokens: Count | None = None
    weak_jail: StrictBool = False
    group: str = ""
    candidate: Count = 0
    candidates: Count = 0

    @model_validator(mode="after")
    def _numbered(self) -> _Header:
        if (self.candidate == 0) != (self.candidates == 0):
            raise ValueError("a candidate needs its number and the number of candidates")
        return self


class _Prompt(_Shape):
    system: str
    task: str


class _Usage(_Only):
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_tokens: Count = 0
    cache_write_tokens: Count = 0


class _Call(_Only):
    id: str
    name: str
    input: dict[str, Any]


class _Answer(_Shape):
    text: str
    author: str
    stop_reason: str
    usage: _Usage = _Usage()
    calls: list[_Call] = []
    blocks: list[dict[str, Any]] = []
    dollars: Amount | None = None


class _Reserved(_Shape):
    model: str
    input_tokens: Count
    max_tokens: Count
    dollars: Amount | None


class _Settled(_Shape):
    usage: _Usage
    dollars: Amount | None


class _Judged(_Shape):
    """The source of a draft or an attempt, with the verdict of the gates."""

    report: Report
    program: str | None
    source: str
    raw: str = ""

    @model_validator(mode="after")
    def _sound(self) -> _Judged:
        _check_report(self.report)
        if self.program:  # raise ValueError for a text that cannot be encoded, and so cannot be hashed later
            f"{self.source}{self.raw}".encode()
        return self


class _Base(_Shape):
    program: str
    report: Accepted
    raw: str
    counted: str

    @model_validator(mode="after")
    def _sound(self) -> _Base:
        _check_report(self.report)
        self.raw.encode()
        return self


class _Stopped(_Shape):
    reason: str


class _Tip(_Shape):
    lesson: str
    failed: str
    fix: str


class _Came(_Shape):
    """A verdict in a recording. Only the verdict's status is validated, because the verdict may come from an
    earlier measurement protocol."""

    status: str


class _Listed(_Shape):
    report: _Came


class _Kernel(_Shape):
    """The compiler's figures for one kernel."""

    kernel: str
    tile: str | None
    registers: Count
    spill_loads: Count
    spill_stores: Count
    hgmma: Count


class _Charged(_Shape):
    gpu_seconds: Amount = 0


_KERNELS = TypeAdapter(list[_Kernel])
_MOMENT = TypeAdapter(Moment)
_NUMBERED = re.compile(r"(?:answer|report|measurement)/[1-9][0-9]{0,5}")


def _check_measurement(payload: Mapping[str, Any]) -> None:
    _check_report(MEASUREMENT.validate_python(uncharged(payload)))


def _void(payload: Mapping[str, Any]) -> None:
    Unmeasured.model_validate(uncharged(payload))


_CHECKS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "prompt": _Prompt.model_validate,
    "base": _Base.model_validate,
    "answer": _Answer.model_validate,
    "draft": _Judged.model_validate,
    "report": _Judged.model_validate,
    "measurement": _check_measurement,
    "void": _void,
    "piece": _Shape.model_validate,
    "stopped": _Stopped.model_validate,
    "tip": _Tip.model_validate,
    "reserved": _Reserved.model_validate,
    "settled": _Settled.model_validate,
}
_KEPT: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "draft": _Listed.model_validate,
    "report": _Listed.model_validate,
    "measurement": _Came.model_validate,
}


def glance(path: Path, before: Sequence[Event] = ()) -> tuple[dict[str, Any], list[Event]]:
    """The header and committed events of the journal at ``path``. Another process may have the journal open.
    ``before``: the events that an earlier call has checked and returned. Raises JournalError."""
    header, new = journal.glance(path, before[-1].seq if before else 0)
    events = [*before, *new]
    _check(path, header, events, new)
    return header, events


def opened(path: Path) -> Journal:
    """Open a journal and lock it against other processes. Raises JournalError."""
    found = Journal.open(path)
    try:
        _check(path, found.header, events := found.events(), events)
    except BaseException:
        found.close()
        raise
    return found


def read_recording(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """The header and events of an exported run, whose verdicts may come from an earlier measurement protocol.
    Raises JournalError."""
    header, events = journal.read_export(path)
    with _checking(path, "header"):
        _Recorded.model_validate(header)
    for event in events:
        _check_event(path, event, _CHECKS | _KEPT)
    return header, events


def check_programs(path: Path, events: Iterable[Event], spec: Spec) -> None:
    """Raise DamagedError if a program in the journal at ``path`` does not fit the spec."""
    for event in events:
        if event.kind in ("report", "base") and event.payload["program"]:
            with _checking(path, event.key):
                Program.from_json(event.payload["program"], spec.signature())


def timings_of(report: Report | Measurement | None) -> tuple[Timing, ...]:
    """The timings of a measured kernel, including a kernel that was rejected as too slow."""
    if isinstance(report, Accepted | Measured):
        return report.timings
    rows = report.evidence.get("timings", ()) if isinstance(report, Rejected) else ()
    # the evidence of a rejection omits the samples
    return tuple(Timing.model_validate({"samples": {}} | row) for row in rows)


def uncharged(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A measurement's payload without the charged GPU seconds."""
    return {key: value for key, value in payload.items() if key != GPU_SECONDS}


def _check(path: Path, header: Mapping[str, Any], events: Sequence[Event], new: Sequence[Event]) -> None:
    with _checking(path, "header"):
        _Header.model_validate(header)
    for event in new:
        _check_event(path, event, _CHECKS)
    payloads: dict[str, Mapping[str, Any]] = {}
    answered = False
    for event in events:
        payloads[event.key] = event.payload
        answered |= event.kind == "answer"
        with _checking(path, event.key):
            if event.kind == "report" and not answered:
                raise ValueError("no answer precedes it")
            if event.kind == "measurement":
                _check_measured(payloads, event)


def _check_measured(payloads: Mapping[str, Mapping[str, Any]], event: Event) -> None:
    """Raise ValueError if no report precedes the measurement, or if the report is about another kernel."""
    report = payloads.get(event.key.replace("measurement", "report"))
    if report is None:
        raise ValueError("it has no report")
    measurement = MEASUREMENT.validate_python(uncharged(event.payload))
    joined(REPORT.validate_python(report["report"]), measurement)


def _check_event(path: Path, event: Event, checks: Mapping[str, Callable[..., object]]) -> None:
    with _checking(path, f"event {event.seq}"):
        head = event.key.partition("/")[0]
        if head != event.kind and (head in checks or event.kind in checks):
            raise ValueError(f"the key {event.key!r} does not match kind {event.kind!r}")
        if event.kind in ("answer", "report", "measurement") and not _NUMBERED.fullmatch(event.key):
            raise ValueError(f"the key {event.key!r} has no number")
        _MOMENT.validate_python(event.time)
        _Charged.model_validate(event.payload)
    with _checking(path, event.key):
        checks.get(event.kind, _Shape.model_validate)(event.payload)


def _check_report(report: Report | Measurement) -> None:
    """Raise ValueError or ProgramError if later code could not use the report's figures or schedules."""
    for gate in () if isinstance(report, Unmeasured) else report.gates:
        if gate.gate == "compile":
            _KERNELS.validate_python(gate.figures.get("kernels", []))
    for timing in timings_of(report):
        if BASELINE not in timing.ratios:
            raise ValueError(f"case {timing.case} has no ratio of {BASELINE!r}")
        by_step(timing.schedules), by_step(timing.kept_schedules)
        for step, raced in timing.finalists.items():
            by_step({step: {}})
            [Schedule.from_json(fields) for fields in raced]


@contextmanager
def _checking(path: Path, place: str) -> Iterator[None]:
    """Run the ``with`` block, which checks one part of the journal at ``path``. If the block raises an error,
    raise a DamagedError that names the part."""
    try:
        yield
    except ValidationError as error:
        raise DamagedError(f"{path}: {first_fault(error, place)}; {OTHER_VERSION}") from None
    except (ValueError, TypeError, ProgramError) as error:
        raise DamagedError(f"{path}: {place}: {error}; {OTHER_VERSION}") from None
