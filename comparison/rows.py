"""The rows of the comparison. A row is one operator at one case's sizes, or one whole layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from coda_agent.agent.reporting.table_rows import (
    GROUPS,
    RMSNORM_BACKWARD,
    SQUARE_WEIGHTS,
    WIDTHS,
    case_order,
)
from coda_agent.agent.storage import quack_tunings
from coda_agent.agent.storage.kernel_files import is_there
from coda_agent.comparison import competitors, kernels, session
from coda_agent.comparison.layers import VARIANTS
from coda_agent.comparison.results import LAYER_BOTH as BOTH
from coda_agent.comparison.results import LAYER_FORWARD as FORWARD
from coda_agent.comparison.results import none_left
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import SPECS
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.worker import Task

if TYPE_CHECKING:
    from coda_agent.primitives.runtime.launch import Kernel

TEN = GROUPS["CODA's ten"]
ARMS = tuple(arm for column in competitors.COLUMNS for arm in column.arms)
PAIRS = 64  # rotated pairs of a head of width 128
GROUPED = ("1B grouped", "8B grouped", "70B grouped")  # layers with the sizes of Llama 3 and grouped heads
LAYERS = 1  # increase it when a variant's computation or stored values change
SQUARES = (2048, 4096, 8192)  # the square sizes in CODA's paper, M = N = K
QUICK = {"gemm_swiglu": "1B", "gemm_residual_partial_rmsnorm": "1B", "gemm_swiglu_bwd": "1B"}


class Row(Protocol):
    """The interface of a row. ``question``: a text that changes if the row's definition changes. For an
    operator, it contains the operator's hash and sizes; for a layer, the layer's shape. ``reference_arm``:
    the arm that is in every session of the row. ``arms``: the arms that can take part."""

    @property
    def operator(self) -> str: ...
    @property
    def case(self) -> str: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def question(self) -> str: ...
    @property
    def reference_arm(self) -> str: ...
    @property
    def arms(self) -> tuple[str, ...]: ...

    def absent(self, arm: str) -> str | None:
        """Why an arm cannot take part, if this is known without a trial."""

    def made_of(self, arm: str) -> list[Kernel]:
        """Our kernels that this arm runs; an empty list for a library's arm."""

    def note(self, arm: str) -> str:
        """A remark on the arm for readers."""

    def least(self, ceilings: Mapping[str, float]) -> float:
        """The shortest possible time in seconds at these peak rates (see
        ``comparison.interleaved.machine``)."""

    def task(self, arms: tuple[str, ...], rounds: int) -> tuple[Task, Any]:
        """The task and argument with which a worker runs a session of these arms."""


@dataclass(frozen=True)
class OperatorRow:
    """One operator at the sizes of ``case``, which is one of the spec's measured cases or a square case."""

    spec: Spec
    case: str
    sizes: Mapping[str, int]
    reference_arm = competitors.REFERENCE_ARM
    arms = tuple(arm for arm in ARMS if arm not in competitors.LAYERS_ONLY)

    @property
    def operator(self) -> str:
        return self.spec.name

    @cached_property
    def question(self) -> str:
        return f"{self.spec.operator_hash} at {dict(self.sizes)}"

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        return kernels.by_arm(self.spec, self.sizes)

    @cached_property
    def quack(self) -> QuackTuned | None:
        """The schedules that an earlier tuning found for QuACK's arms at these sizes, if any."""
        return quack_tunings.quack(self.spec).get(self.case)

    def absent(self, arm: str) -> str | None:
        if arm in (competitors.PROGRAM, competitors.EDITED) and arm not in self.kernels:
            none = "no accepted kernel" if arm == competitors.PROGRAM else "its CuTeDSL was not edited"
            return kernels.outdated(self.spec, edited=arm == competitors.EDITED) or none
        return competitors.absent(self.spec, arm)

    def made_of(self, arm: str) -> list[Kernel]:
        return [self.kernels[arm]] if arm in self.kernels else []

    def note(self, arm: str) -> str:
        return competitors.note(self.spec, arm)

    def least(self, ceilings: Mapping[str, float]) -> float:
        """The roofline of the program that a model wrote for the operator, in seconds."""
        program = kernels.written(self.spec)
        return roofline(program, self.sizes, kernels.machine(ceilings)).seconds

    def task(self, arms: tuple[str, ...], rounds: int) -> tuple[Task, Any]:
        return session.measure_operator, session.OperatorArms(
            self.spec, self.sizes, arms, self.kernels, rounds, self.quack
        )


@dataclass(frozen=True)
class LayerRow:
    """A LLaMA-style layer of the width that ``case`` names, without or with its backward."""

    case: str
    backward: bool
    reference_arm = competitors.EAGER
    arms = ARMS

    @property
    def operator(self) -> str:
        return BOTH if self.backward else FORWARD

    @cached_property
    def shape(self) -> Any:
        from coda_agent.comparison.layers import shape

        return (shape.WIDTHS | shape.GROUPED)[self.case]

    @property
    def sizes(self) -> dict[str, int]:
        s = self.shape
        found = {"heads": s.heads, "head": s.head_width, "F": s.ffn, "B": s.sequences, "L": s.length}
        return found | ({"groups": s.groups} if s.groups else {})

    @property
    def question(self) -> str:
        return f"layer {self.sizes}, revision {LAYERS}"

    @cached_property
    def kernels(self) -> list[tuple[Kernel, dict[str, int]]]:
        """The programs that the package ``fused`` runs for this layer. Each has its sizes, and the schedules
        that ``fused`` chooses on this machine."""
        from coda_agent.comparison.layers.fused import programs
        from coda_agent.fused.ahead import on_schedules
        from coda_agent.primitives.runtime.launch import Kernel

        bounds = programs(self.shape, backward=self.backward)
        return [(Kernel(on_schedules(bound)), bound.sizes) for bound in bounds]

    def absent(self, arm: str) -> str | None:
        return None if arm in VARIANTS else "it has no layer"

    def made_of(self, arm: str) -> list[Kernel]:
        return [kernel for kernel, _ in self.kernels] if arm == competitors.FUSED else []

    def note(self, arm: str) -> str:
        return {
            competitors.FUSED: "no model wrote its programs",
            competitors.LIGER: "one matmul computes q, k and v",
            competitors.QUACK: "QuACK's functions compute everything except attention and the last addition",
        }.get(arm, "")

    def least(self, ceilings: Mapping[str, float]) -> float:
        """The time in seconds that the tensor cores need for matmuls and attention. A backward adds twice the
        forward's time."""
        s = self.shape
        products = 2 * s.tokens * s.width * (sum(s.projections) + s.width + 3 * s.ffn)
        attention = 2 * s.sequences * s.length**2 * s.width  # causal: half of two matmuls
        return float((products + attention) * (3 if self.backward else 1) / ceilings["tensor"])

    def task(self, arms: tuple[str, ...], rounds: int) -> tuple[Task, Any]:
        from coda_agent.comparison.layers import session as layers

        made = self.kernels if competitors.FUSED in arms else ()
        return layers.measure_layer, layers.LayerArms(self.shape, arms, made, rounds, self.backward)


def choose_rows(only: Collection[str], cases: Collection[str], *, everything: bool, quick: bool) -> list[Row]:
    """Choose rows. By default, choose layers, and CODA's ten operators at three widths and at the square
    sizes. ``everything`` adds the rows of all other accepted kernels; ``quick`` keeps only a few rows.
    ``only`` and ``cases`` select operators and cases by name. Raises InvalidInput if no row is left."""
    names = list(QUICK if quick else TEN)
    if everything and not quick:
        names = [name for group in GROUPS.values() for name in group if is_there(name)]
    there = sorted(path.stem for path in SPECS.glob("*.yaml"))
    unknown = sorted(set(only) - {*there, FORWARD, BOTH})
    if unknown:
        raise InvalidInput(
            f"there is no {', '.join(unknown)}; --only takes a spec, 'layer', {FORWARD!r} or {BOTH!r}"
        )
    specs = [load(SPECS / f"{name}.yaml", check=False) for name in (only or names) if name in there]
    every: list[Row] = [row for spec in specs for row in _rows(spec)]
    for name, backward in ((FORWARD, False), (BOTH, True)):
        if name in only if only else not quick:
            every += [LayerRow(case, backward) for case in (*WIDTHS, *GROUPED)]
    kept = [
        row
        for row in every
        if (row.case in cases if cases else everything or _usual(row))
        and (not quick or only or cases or row.case == QUICK[row.operator])
    ]
    if not kept:
        named = ", ".join(dict.fromkeys(row.case for row in every))
        raise none_left((), cases, f"these operators have the cases {named}")
    return kept


def _usual(row: Row) -> bool:
    """Whether a row belongs to the default table. The table also has RMSNorm's backward with square weights,
    because CODA's paper makes a claim about this case."""
    squares = SQUARE_WEIGHTS if row.operator == RMSNORM_BACKWARD else ()
    return row.case in (*WIDTHS, *map(_square, SQUARES), *squares)


def _rows(spec: Spec) -> Iterator[OperatorRow]:
    measured = [case for case in spec.cases if case.bench]
    for case in sorted(measured, key=lambda case: case_order(case.name)):
        yield OperatorRow(spec, case.name, case.sizes)
    for n in SQUARES:
        if sizes := square(spec.name, n):
            yield OperatorRow(spec, _square(n), sizes)


def _square(n: int) -> str:
    return f"square {n}"


def square(operator: str, n: int) -> dict[str, int]:
    """The sizes at which an operator's matmul has M = N = K = ``n``. CODA's paper measures only three
    operators at these sizes; for all other operators, the result is empty."""
    return {
        "gemm_residual_partial_rmsnorm": {"M": n, "K": n, "N": n},
        "gemm_rope": {"M": n, "K": n, "H": n // (2 * PAIRS), "P": PAIRS},
        "gemm_swiglu": {"M": n, "D": n, "F": n // 2},
    }.get(operator, {})
