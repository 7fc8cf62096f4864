"""What verifying one kernel says: ``Accepted | Checked | Rejected``, told apart by ``status``.

Each carries only the fields its status can have. Times are milliseconds, ratios are other over
candidate (above 1: the candidate is faster), intervals are at the stated confidence.
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
RAW_GATES = ("edit", *GATES[1:])  # of an edited text: a program is there already
PRIMITIVE_GATES = ("form", "interpret", "compile", "numerics", "stability")  # of a primitive's functions

# How kernels are measured, since 2026-11-23. Whoever makes it stricter takes the next number.
PROTOCOL = 5
TYPICAL_ALONE = 4  # the same without stretched inputs: reports of it stand until they are renewed

CANDIDATE = "candidate"  # the arm that every timing has

# Reports come from files too: what is computed with them must be neither infinite nor out of reach.
Positive = Annotated[float, Field(gt=0, lt=1e12)]  # milliseconds, and ratios of them
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
Sizes = dict[str, Annotated[int, Field(gt=0, lt=1 << 40)]]

Config = dict[str, StrictBool | StrictInt | None]  # the fields of a schedule of QuACK's, its GemmConfig
# Of each stage those of tuning's last race, fastest first.
Finalists = tuple[Annotated[tuple[Config, ...], Field(min_length=1)], ...]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gate(_Record):
    """A gate that was passed: how long it took, its figures, and what it found but does not reject."""

    gate: str
    seconds: Seconds
    figures: dict[str, Any] = Field(default_factory=dict)
    findings: tuple[str, ...] = ()


class Identity(_Record):
    """What the evidence is for: SHA-256 of spec, program and lowered text, and versions of packages.
    ``raw``: an author has edited that text."""

    spec: str
    spec_hash: str
    program_hash: str
    lowered_hash: str
    versions: dict[str, str]
    raw: bool = False

    def same(self, other: Identity) -> bool:
        """Whether both are of one kernel, on whatever versions of packages."""
        return self.model_dump(exclude={"versions"}) == other.model_dump(exclude={"versions"})


class Ratio(_Record):
    """A ratio with its confidence interval, which encloses Student's over processes and the bootstrap's.

    ``detectable``: the least relative difference that this measurement would have told from none.
    """

    estimate: Positive
    low: Positive
    high: Positive
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    detectable: Seconds | None = None


class Timing(_Record):
    """One measured case: schedules by step, the median of each arm, and its ratio to the candidate.

    ``samples``: milliseconds by arm, process and round. ``cold``: every timed call found an evicted L2.
    ``graph_milliseconds``: the candidate replayed from a CUDA graph. ``parts``: milliseconds of each of its
    parts by itself, in the roofline's words, where it has several. ``finalists``: by step, the schedules of
    tuning's last race, fastest first: worth trying next time. ``kept_schedules``: what the kernel before was
    tuned to in the same measurement, where one was to be beaten. ``quack``: ``finalists`` of each of QuACK's
    arms, by stage, whose first ones are what it ran on; for information, and to be raced again.
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


class QuackTuned(_Record):
    """What QuACK's arms, by name, were tuned to at one case: of use to that ``version`` of quack-kernels on
    that GPU."""

    gpu: str
    version: str
    arms: dict[str, Finalists]


class Authorship(_Record):
    """Who wrote the kernel, through which provider, in how many attempts."""

    author: str
    attempts: int
    run: str


class Rejected(_Record):
    """A candidate that failed a gate: the reason for the author, the evidence, and the gates before."""

    status: Literal["rejected"] = "rejected"
    gate: str
    code: str
    message: str
    line: int | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    gates: tuple[Gate, ...] = ()


class Checked(_Record):
    """All gates passed that this machine can run; nothing was measured."""

    status: Literal["checked"] = "checked"
    identity: Identity
    gates: tuple[Gate, ...]
    unmeasured: str


def _moment(text: str) -> str:
    with suppress(ValueError):
        if datetime.fromisoformat(text).tzinfo:
            return text
    raise ValueError(f"{text!r} is no moment with its zone, such as 2026-11-22T03:05:37+00:00")


Moment = Annotated[str, AfterValidator(_moment)]


class _Measurement(_Record):
    """What gates on a GPU found: of what, on what, with which inputs, when. ``protocol``: how (``PROTOCOL``);
    0 in recorded ones from before they said so. ``rival``: the hash of the lowered text of the kernel
    before, where one was to be beaten. ``renewed``: when and on what numerics and stability were passed
    again, by a later protocol than what was timed."""

    protocol: int = 0
    identity: Identity
    rival: str = ""
    gates: tuple[Gate, ...]
    timings: tuple[Timing, ...]
    conditions: dict[str, Any]
    controls: tuple[dict[str, Any], ...] = ()
    seconds: dict[str, Seconds] = Field(default_factory=dict)  # by stage of the measurement
    seeds: dict[str, int]
    renewed: dict[str, str] = Field(default_factory=dict)
    date: Moment

    def quack(self) -> dict[str, QuackTuned]:
        """By case, what QuACK's arms were tuned to; nothing of those that do not say so."""
        gpu, version = str(self.conditions.get("gpu", "")), self.identity.versions.get("quack-kernels", "")
        return {t.case: QuackTuned(gpu=gpu, version=version, arms=t.quack) for t in self.timings if t.quack}


class Unmeasured(_Record):
    """The measurement is not to be believed, which says nothing of the kernel: why, and what it saw."""

    status: Literal["unmeasured"] = "unmeasured"
    reason: str
    evidence: dict[str, Any] = Field(default_factory=dict)


class Measured(_Measurement):
    """The gates on a GPU were passed; with a ``Checked`` of the same kernel it makes an ``Accepted``."""

    status: Literal["measured"] = "measured"


class Accepted(_Measurement):
    """All gates passed, on a GPU too: right, stable and measured, and faster than the spec demands on every
    case that decides. Where none does, as all of a spec's measured cases are ``bench: report`` (the fp8
    ones are), it claims nothing on speed."""

    status: Literal["accepted"] = "accepted"
    authorship: Authorship | None = None


Report = Annotated[Accepted | Checked | Rejected, Field(discriminator="status")]
REPORT: TypeAdapter[Accepted | Checked | Rejected] = TypeAdapter(Report)
Measurement = Measured | Unmeasured | Rejected
MEASUREMENT: TypeAdapter[Measurement] = TypeAdapter(Annotated[Measurement, Field(discriminator="status")])


def accepted(checked: Checked, measured: Measured, authorship: Authorship | None) -> Accepted:
    """Join what a machine without a GPU checked and what one with a GPU measured, of one identity.

    ValueError if they speak of different things.
    """
    if not checked.identity.same(measured.identity):
        raise ValueError("the measurement is of another spec, program or lowered text than what was checked")
    fields = measured.model_dump(exclude={"status", "gates"})
    return Accepted(**fields, gates=checked.gates + measured.gates, authorship=authorship)


def joined(report: Accepted | Checked | Rejected, found: Measurement | None) -> Accepted | Checked | Rejected:
    """What was checked, with what was measured of it, if anything was."""
    if found is None or not isinstance(report, Checked):
        return report
    if isinstance(found, Measured):
        return accepted(report, found, None)
    if isinstance(found, Unmeasured):
        return report.model_copy(update={"unmeasured": f"checked; the measurement is void: {found.reason}"})
    return found.model_copy(update={"gates": report.gates + found.gates})
