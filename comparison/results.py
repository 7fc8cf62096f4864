"""What a comparison has measured, as ``results.json`` keeps it: sittings, each of one row in one process.

In a sitting several arms took turns, round by round, so that arms of one sitting are compared round by round;
arms of different sittings through the anchor, which sat in both. Times are milliseconds, memory is bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.report import Sizes
from coda_agent.verifier.statistics import MIN_ROUNDS

SCHEMA = 1
LAYER_FORWARD, LAYER_BOTH = "layer, forward", "layer, forward and backward"  # operators of whole layers


# A file's numbers are computed with: ratios, sums and scales of these stay finite.
Milliseconds = Annotated[float, Field(gt=1e-6, lt=1e9)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Error = Annotated[float, Field(ge=0, lt=1e30)]


class ResultsError(Exception):
    """A file of results that cannot be used: which one, what is wrong with it, and what to do."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Loss(_Record):
    """How far one output is from fp64: its RMS error over the truth's RMS, and over what any kernel must
    lose (the error gate's yardstick)."""

    relative: Error
    yardsticks: Error


class Arm(_Record):
    """What one arm did in one sitting. ``key`` says what it was: a library's versions, or a kernel's hash.

    ``milliseconds`` by round; ``losses`` by output, empty where it has none of the spec's; ``bytes``: what a
    call holds at its peak beyond its inputs; ``note``: what was prepared outside the clock, and the like;
    ``seconds`` that it took to prepare: to compile, to tune, to be compared with the truth.
    """

    key: str
    milliseconds: tuple[Milliseconds, ...] = Field(min_length=MIN_ROUNDS)
    losses: dict[str, Loss] = Field(default_factory=dict)
    bytes: int = Field(ge=0, lt=1 << 50)
    note: str = ""
    seconds: Seconds = 0.0


class Failure(_Record):
    """Why an arm has no figures in a sitting that it was to be in."""

    key: str
    reason: str


class Sitting(_Record):
    """One row in one process: all arms that took turns there, if any did, and those that failed.

    ``question`` changes with what was asked. ``anchor``: the arm that every sitting of the row has.
    ``roofline``: the least time the hardware allows, at the machine's measured ceilings. ``conditions``:
    device, driver, versions, clocks. ``seconds``: all of it, imports and compilers too.
    """

    operator: str
    case: str
    sizes: Sizes
    question: str
    process: int = Field(ge=0, lt=1 << 20)
    anchor: str
    roofline: Milliseconds
    arms: dict[str, Arm]
    failed: dict[str, Failure] = Field(default_factory=dict)
    conditions: dict[str, Any] = Field(default_factory=dict)
    date: str
    seconds: Seconds = 0.0

    @model_validator(mode="after")
    def _anchored(self) -> Sitting:
        rounds = {len(arm.milliseconds) for arm in self.arms.values()}
        if self.arms and self.anchor not in self.arms or len(rounds) > 1:
            raise ValueError(f"who sits does so with the anchor, {self.anchor!r}, for as many rounds")
        return self

    @property
    def row(self) -> tuple[str, str]:
        return self.operator, self.case


class Machine(_Record):
    """A results file's GPU, and the ``ceilings`` (``comparison.interleaved.machine``) of its rooflines."""

    gpu: str
    ceilings: dict[str, Annotated[float, Field(gt=0, lt=1e20)]]


class Present(_Record):
    """What was asked of a row when it was asked for last, and the ``keys`` that its arms had then, measured
    or not yet."""

    question: str
    keys: dict[str, str]


class Results(_Record):
    """``absent``: by operator and arm, why it cannot have a cell: known without trying. ``present``: by
    operator and case. ``machine``: measured once, by the first that measured anything."""

    schema_version: int = SCHEMA
    machine: Machine | None = None
    sittings: tuple[Sitting, ...] = ()
    absent: dict[str, dict[str, str]] = Field(default_factory=dict)
    present: dict[str, dict[str, Present]] = Field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """(operator, case), in the order in which they were first measured."""
        return list(dict.fromkeys(s.row for s in self.sittings))

    def of(self, operator: str, case: str) -> list[Sitting]:
        """The sittings of a row, oldest first."""
        return [s for s in self.sittings if s.row == (operator, case)]

    def gpus(self) -> set[str]:
        """What was measured on; one, as ``comparison.measuring`` sees to."""
        told = {str(s.conditions["gpu"]) for s in self.sittings if "gpu" in s.conditions}
        return told | ({self.machine.gpu} if self.machine else set())

    def failed(self) -> bool:
        return any(s.failed for s in self.sittings)

    def asked(self, operator: str, case: str, now: Present, absent: dict[str, str]) -> Results:
        """With what a row is now, and which arms cannot be tried; of other arms as before."""
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

    def plus(self, sittings: Iterable[Sitting]) -> Results:
        return self.model_copy(update={"sittings": (*self.sittings, *sittings)})

    def chosen(self, operators: Collection[str], cases: Collection[str]) -> Results:
        """Of these operators and cases alone, or of all where none are named. ResultsError where none is
        left."""
        kept = tuple(
            s
            for s in self.sittings
            if (not operators or s.operator in operators) and (not cases or s.case in cases)
        )
        if self.sittings and not kept:
            rows = ", ".join(f"{operator} {case}" for operator, case in self.rows())
            raise none_left(operators, cases, f"these results have {rows}")
        return self.model_copy(update={"sittings": kept})


def none_left(operators: Iterable[str], cases: Iterable[str], known: str) -> ResultsError:
    """Of what these, as they were asked for, leave no row of; ``known``: what there is instead."""
    named = ", ".join([*(f"--only {o}" for o in operators), *(f"--cases {c}" for c in cases)])
    return ResultsError(f"{named and f'{named}: '}no row is left: {known}")


def read(path: Path) -> Results:
    """Raises ResultsError; OSError where it cannot be read."""
    try:
        found = Results.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        folder = path.parent if path.suffix else path
        raise ResultsError(
            f"{path}: there is no such file; on an H100, coda-agent compare --out {folder} makes it"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        if not (place := ".".join(map(str, first["loc"]))):
            raise ResultsError(
                f"{path}: holds no results of compare; give a folder of its, or results.json"
            ) from None
        raise ResultsError(f"{path}: {place}: {first['msg']}; measure again into another folder") from None
    if found.schema_version != SCHEMA:
        raise ResultsError(f"{path}: is of version {found.schema_version}, and this reads {SCHEMA}")
    return found


def write(path: Path, results: Results) -> None:
    """Atomically, for a comparison that is interrupted goes on from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, results.model_dump_json() + "\n")
