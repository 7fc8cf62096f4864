"""The results of a comparison, stored in ``results.json`` as sessions. A session measures one row in one
process.

Arms of one session are timed interleaved, so they are compared round by round. Arms of different sessions are
compared through the reference arm, which is in every session. Times are in milliseconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coda_agent.primitives.errors import InvalidInput, first_fault
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.report import Sizes
from coda_agent.verifier.statistics import MIN_ROUNDS

SCHEMA = 1
GONE = ""  # the key of a kernel that was withdrawn, or that no longer lowers to the accepted code
LAYER_FORWARD, LAYER_BOTH = "layer, forward", "layer, forward and backward"  # "operators" of whole layers


# Limits on the numbers in a results file, so that their ratios and sums and the scales of charts are finite.
Milliseconds = Annotated[float, Field(gt=1e-6, lt=1e9)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Error = Annotated[float, Field(ge=0, lt=1e30)]


class _ResultsModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_by_name=True)


class Loss(_ResultsModel):
    """One output's RMS error, as two ratios. ``relative``: divided by the RMS of the exact output.
    ``yardsticks``: divided by the RMS error of the yardstick. For a layer, the yardstick is eager PyTorch."""

    relative: Error
    yardsticks: Error


class ArmResult(_ResultsModel):
    """The figures of one arm in one session. ``key`` identifies the arm by a library's versions, or by a
    kernel's hash.

    ``milliseconds``: one time per round. ``losses``: the loss of each output; empty if the arm computes none
    of the spec's outputs. ``bytes``: a call's peak memory beyond its inputs. ``note``: remarks, for example
    on preparation that is not timed. ``seconds``: the duration of the preparation (compiling, tuning,
    comparing with the exact outputs).
    """

    key: str
    milliseconds: tuple[Milliseconds, ...] = Field(min_length=MIN_ROUNDS)
    losses: dict[str, Loss] = Field(default_factory=dict)
    bytes: int = Field(ge=0, lt=1 << 50)
    note: str = ""
    seconds: Seconds = 0.0


class ArmFailure(_ResultsModel):
    """Why an arm has no figures in its session."""

    key: str
    reason: str


class Session(_ResultsModel):
    """The measurement of one row in one process: the arms that were timed, and the arms that failed.

    ``question``: a text that changes if the row's definition changes. ``reference_arm``: the arm that is in
    every session of the row. ``roofline``: the smallest time that the machine's measured peak rates allow.
    ``conditions``: device, driver, versions, clocks. ``seconds``: the duration of the whole session,
    including imports and compilation.
    """

    operator: str
    case: str
    sizes: Sizes
    question: str
    process: int = Field(ge=0, lt=1 << 20)
    reference_arm: str = Field(validation_alias="anchor", serialization_alias="anchor")
    roofline: Milliseconds
    arms: dict[str, ArmResult]
    failed: dict[str, ArmFailure] = Field(default_factory=dict)
    conditions: dict[str, Any] = Field(default_factory=dict)
    date: str
    seconds: Seconds = 0.0

    @model_validator(mode="after")
    def _complete(self) -> Session:
        rounds = {len(arm.milliseconds) for arm in self.arms.values()}
        if self.arms and self.reference_arm not in self.arms or len(rounds) > 1:
            raise ValueError(
                f"a session needs its reference arm, {self.reference_arm!r}, and equally many rounds per arm"
            )
        return self

    @property
    def row(self) -> tuple[str, str]:
        return self.operator, self.case


class MeasuredMachine(_ResultsModel):
    """The GPU of a results file. ``ceilings``: the GPU's peak rates, which ``comparison.interleaved.machine``
    measures for the rooflines."""

    gpu: str
    ceilings: dict[str, Annotated[float, Field(gt=0, lt=1e20)]]


class Present(_ResultsModel):
    """A row at its latest request. ``question``: as in ``Session``. ``keys``: the key of each arm that could
    be tried, even if the arm was not measured; ``GONE`` for a kernel that is no longer there."""

    question: str
    keys: dict[str, str]


class Results(_ResultsModel):
    """A results file. ``absent``: for each operator and arm, why the arm cannot be tried. ``present``: for
    each operator and case, the row at its latest request. ``machine``: measured once, before the first
    session."""

    schema_version: int = SCHEMA
    machine: MeasuredMachine | None = None
    sessions: tuple[Session, ...] = Field(
        default=(), validation_alias="sittings", serialization_alias="sittings"
    )
    absent: dict[str, dict[str, str]] = Field(default_factory=dict)
    present: dict[str, dict[str, Present]] = Field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """The pairs (operator, case), in the order of their first measurement."""
        return list(dict.fromkeys(s.row for s in self.sessions))

    def of(self, operator: str, case: str) -> list[Session]:
        """The sessions of a row, oldest first."""
        return [s for s in self.sessions if s.row == (operator, case)]

    def latest(self, operator: str, case: str) -> Present | None:
        """A row at its latest request."""
        return self.present.get(operator, {}).get(case)

    def gpus(self) -> set[str]:
        """The GPUs of all sessions; ``comparison.measuring`` allows only one GPU."""
        told = {str(s.conditions["gpu"]) for s in self.sessions if "gpu" in s.conditions}
        return told | ({self.machine.gpu} if self.machine else set())

    def failed(self) -> bool:
        """Whether any arm failed in its last session."""
        last = {(s.row, arm): arm in s.failed for s in self.sessions for arm in (*s.failed, *s.arms)}
        return any(last.values())

    def asked(self, operator: str, case: str, now: Present, absent: dict[str, str]) -> Results:
        """Update the results with a row's current definition, and with the reasons why some arms cannot be
        tried. The entries of other arms do not change."""
        cases = self.present.get(operator, {})
        before = cases[case].keys if case in cases and cases[case].question == now.question else {}
        row = Present(question=now.question, keys=before | now.keys)
        known = {a: why for a, why in self.absent.get(operator, {}).items() if a not in now.keys}
        return self.model_copy(
            update={
                "present": self.present | {operator: cases | {case: row}},
                "absent": self.absent | {operator: known | absent},
            }
        )

    def plus(self, sessions: Iterable[Session]) -> Results:
        return self.model_copy(update={"sessions": (*self.sessions, *sessions)})

    def chosen(self, operators: Collection[str], cases: Collection[str]) -> Results:
        """The results for only these operators and cases; an empty collection means all. Raises InvalidInput
        if no session is left, or if an operator or a case has no session. Only one of the two passes of a
        layer needs a session."""
        kept = tuple(
            s
            for s in self.sessions
            if (not operators or s.operator in operators) and (not cases or s.case in cases)
        )
        layers, measured = {LAYER_FORWARD, LAYER_BOTH}, {s.operator for s in self.sessions}
        there = measured | (layers if layers <= {*operators} and layers & measured else set())
        lacking = [o for o in dict.fromkeys(operators) if o not in there]
        without = [c for c in dict.fromkeys(cases) if c not in {s.case for s in self.sessions}]
        if self.sessions and (lacking or without or not kept):
            rows = ", ".join(f"{operator} {case}" for operator, case in self.rows())
            named = (lacking, without) if lacking or without else (operators, cases)
            raise none_left(*named, f"these results have {rows}")
        return self.model_copy(update={"sessions": kept})


def none_left(operators: Iterable[str], cases: Iterable[str], known: str) -> InvalidInput:
    """The error for a choice that leaves no row. ``known`` lists the possible choices."""
    named = ", ".join([*(f"--only {o}" for o in operators), *(f"--cases {c}" for c in cases)])
    return InvalidInput(f"{named and f'{named}: '}no row is left: {known}")


def read(path: Path) -> Results:
    """Read a results file. Raises InvalidInput if the file is missing or malformed, and OSError if it cannot
    be read."""
    try:
        found = Results.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        folder = path.parent if path.suffix else path
        raise InvalidInput(
            f"{path}: no such file; on an H100, coda-agent compare --out {folder} creates it"
        ) from None
    except ValidationError as error:
        if not error.errors()[0]["loc"]:
            raise InvalidInput(
                f"{path}: no results file; give a folder that coda-agent compare wrote, or results.json"
            ) from None
        raise InvalidInput(f"{path}: {first_fault(error)}; measure again into another folder") from None
    if found.schema_version != SCHEMA:
        raise InvalidInput(
            f"{path}: its format is version {found.schema_version}; this version reads {SCHEMA}"
        )
    return found


def write(path: Path, results: Results) -> None:
    """Write a results file atomically. An interrupted comparison can then continue from a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, results.model_dump_json(by_alias=True) + "\n")
