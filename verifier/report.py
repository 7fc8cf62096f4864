"""Reports on one kernel: ``Accepted | Checked | Rejected``, discriminated by ``status``.

Each report has only the fields of its status. Times are in milliseconds. A ratio is another arm's time
divided by the candidate's time, so the candidate is faster if the ratio is above 1. Each interval states its
confidence.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    TypeAdapter,
    model_validator,
)

GATES = ("trace", "contract", "interpret", "compile", "numerics", "stability", "benchmark", "decision")
# Gates for lowered code that an author edited. ``edit`` replaces ``trace``, because the code's program was
# traced before.
RAW_GATES = ("edit", *GATES[1:])
# gates for the functions of a proposed primitive
PRIMITIVE_GATES = ("form", "interpret", "compile", "numerics", "stability")

# The version of the measurement protocol, in use since 2026-11-23. A stricter protocol has a higher number.
PROTOCOL = 5

CANDIDATE = "candidate"  # the arm that every timing has

# Reports also come from files, so numbers are bounded to keep computations from overflowing.
Positive = Annotated[float, Field(gt=0, lt=1e12)]  # milliseconds, or a ratio of two times
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
Sizes = dict[str, Annotated[int, Field(gt=0, lt=1 << 40)]]

Config = dict[str, StrictBool | StrictInt | None]  # a schedule of QuACK: the fields of its GemmConfig
# For each stage, the schedules that remained at the end of tuning, fastest first.
Finalists = tuple[Annotated[tuple[Config, ...], Field(min_length=1)], ...]


class _ReportModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gate(_ReportModel):
    """A passed gate: its duration in seconds, its figures, and findings that do not reject the kernel."""

    gate: str
    seconds: Seconds
    figures: dict[str, Any] = Field(default_factory=dict)
    findings: tuple[str, ...] = ()


class Identity(_ReportModel):
    """The identity of the measured kernel: SHA-256 of spec, program and lowered text, and versions of
    packages. ``raw``: whether an author edited the lowered code."""

    spec: str
    spec_hash: str
    program_hash: str
    lowered_hash: str
    versions: dict[str, str]
    raw: bool = False

    def same(self, other: Identity) -> bool:
        """Whether the two identities are those of the same kernel. Package versions do not count."""
        return self.model_dump(exclude={"versions"}) == other.model_dump(exclude={"versions"})


class Ratio(_ReportModel):
    """A ratio with its confidence interval. The interval is the union of two others: the Student's t interval
    over processes, and the bootstrap interval.

    ``detectable``: the smallest relative difference that this measurement could detect.
    """

    estimate: Positive
    low: Positive
    high: Positive
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    detectable: Seconds | None = None


class Timing(_ReportModel):
    """One measured case. It has the schedules by step, each arm's median, and each arm's ratio to the
    candidate.

    ``samples``: milliseconds by arm, process and round. ``cold``: whether the L2 was evicted before every
    timed call. ``graph_milliseconds``: the candidate's time in a CUDA graph. ``parts``: for a kernel of
    several parts, the milliseconds of each part alone, by the part's name in the roofline. ``finalists``: by
    step, the schedules that remained at the end of tuning, fastest first. ``kept_schedules``: the incumbent's
    schedules, by step; this measurement tuned the incumbent too. ``quack``: for each QuACK arm, the
    ``finalists`` of each of its stages. Each stage ran with its first finalist.
    """

    case: str
    sizes: Sizes
    schedules: dict[str, dict[str, Any]]
    milliseconds: dict[str, Positive]
    ratios: dict[str, Ratio]
    roofline_milliseconds: Positive
    host_microseconds: dict[str, Positive]
    graph_milliseconds: Positive | None = None
    parts: dict[str, Positive] = Field(default_factory=dict)
    tuning_seconds: Seconds
    finalists: dict[str, tuple[dict[str, Any], ...]] = Field(default_factory=dict)
    kept_schedules: dict[str, dict[str, Any]] = Field(default_factory=dict)
    quack: dict[str, Finalists] = Field(default_factory=dict)
    processes: int = 1
    rounds: int
    cold: bool = True
    input_sets: int = 1
    samples: dict[str, tuple[tuple[Positive, ...], ...]]

    @model_validator(mode="after")
    def _compared(self) -> Timing:
        if CANDIDATE not in self.milliseconds.keys() & self.host_microseconds.keys():
            raise ValueError(f"case {self.case} has no times of {CANDIDATE!r}")
        return self


class QuackTuned(_ReportModel):
    """The schedules of QuACK's arms at one case, valid for this ``version`` of quack-kernels on this GPU."""

    gpu: str
    version: str
    arms: dict[str, Finalists]


class Authorship(_ReportModel):
    """The kernel's author, the number of attempts, and the run that made it."""

    author: str
    attempts: int
    run: str


class Rejected(_ReportModel):
    """A candidate that failed a gate. It has the message for the author, the evidence, and the gates that the
    candidate passed before."""

    status: Literal["rejected"] = "rejected"
    gate: str
    code: str
    message: str
    line: int | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    gates: tuple[Gate, ...] = ()

    @property
    def place(self) -> str:
        """The line, as the beginning of a message; "" if the message is about no line."""
        return f"line {self.line}: " if self.line else ""


class Checked(_ReportModel):
    """A kernel that passed every gate that needs no GPU; nothing was measured."""

    status: Literal["checked"] = "checked"
    identity: Identity
    gates: tuple[Gate, ...]
    unmeasured: str


def _moment(text: str) -> str:
    with suppress(ValueError):
        if datetime.fromisoformat(text).tzinfo:
            return text
    raise ValueError(f"{text!r} is not a time with a zone, such as 2026-11-22T03:05:37+00:00")


Moment = Annotated[str, AfterValidator(_moment)]


class _Measurement(_ReportModel):
    """The result of the GPU gates, with the machine, the inputs' seeds and the date. ``protocol`` is 0 in
    recordings from the time when protocols had no numbers. ``rival``: the hash of the incumbent's lowered
    code; "" without an incumbent. ``renewed``: the date and the machine of a later run of the gates numerics
    and stability under a newer protocol; empty without such a run."""

    protocol: int = 0
    identity: Identity
    rival: str = ""
    gates: tuple[Gate, ...]
    timings: tuple[Timing, ...]
    conditions: dict[str, Any]
    controls: tuple[dict[str, Any], ...] = ()
    seconds: dict[str, Seconds] = Field(default_factory=dict)  # by stage
    seeds: dict[str, int]
    renewed: dict[str, str] = Field(default_factory=dict)
    date: Moment

    def quack(self) -> dict[str, QuackTuned]:
        """The schedules of QuACK's arms, by case. Cases without QuACK arms are left out."""
        gpu, version = str(self.conditions.get("gpu", "")), self.identity.versions.get("quack-kernels", "")
        return {t.case: QuackTuned(gpu=gpu, version=version, arms=t.quack) for t in self.timings if t.quack}


class Unmeasured(_ReportModel):
    """An invalid measurement, with the reason and the evidence. It says nothing about the kernel."""

    status: Literal["unmeasured"] = "unmeasured"
    reason: str
    evidence: dict[str, Any] = Field(default_factory=dict)


class Measured(_Measurement):
    """The result of a kernel that passed the GPU gates. Together with a ``Checked`` of the same kernel it
    forms an ``Accepted``."""

    status: Literal["measured"] = "measured"


class Accepted(_Measurement):
    """A kernel that passed all gates: it is correct, stable, measured, and faster than the spec demands on
    every deciding case. If all measured cases are ``bench: report`` (as for fp8), no case decides, and the
    report makes no claim about speed."""

    status: Literal["accepted"] = "accepted"
    authorship: Authorship | None = None


Report = Annotated[Accepted | Checked | Rejected, Field(discriminator="status")]
REPORT: TypeAdapter[Report] = TypeAdapter(Report)
Measurement = Measured | Unmeasured | Rejected
MEASUREMENT: TypeAdapter[Measurement] = TypeAdapter(Annotated[Measurement, Field(discriminator="status")])


def joined(report: Report, found: Measurement | None) -> Report:
    """The report, joined with the measurement of the same kernel on a GPU, if there is one. Raises ValueError
    if the two are of different kernels."""
    if found is None or not isinstance(report, Checked):
        return report
    if isinstance(found, Unmeasured):
        return report.model_copy(update={"unmeasured": f"checked; measurement invalid: {found.reason}"})
    if isinstance(found, Rejected):
        return found.model_copy(update={"gates": report.gates + found.gates})
    if not report.identity.same(found.identity):
        raise ValueError("the measured spec, program or lowered text differs from the checked one")
    return Accepted(**found.model_dump(exclude={"status", "gates"}), gates=report.gates + found.gates)
