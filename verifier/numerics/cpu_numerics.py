"""The interpret gate: compare a program with its spec's reference on a CPU, on many families of inputs and
sizes.

Each run is judged twice: with outputs stored as a kernel stores them, and with outputs left in fp32. The
second judgement detects formulas that are almost right, such as another GELU formula or a piecewise sigmoid.
Rounding to 16 bits would hide the errors of such formulas. The second judgement also gives small values as
much weight as large ones, so it detects a wrong tail of an activation.

On typical inputs, the program also runs in fp64 without any rounding. Then only its formulas differ from the
reference's, so that even a slope of 0.9999 or another GELU formula behind a second matmul shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import torch

from coda_agent.primitives.lang.assign_steps import untransposed
from coda_agent.primitives.lang.interpret import Watch, interpret, rounded, saturated
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.verifier.numerics import error_gate, exactness, gradients, reference
from coda_agent.verifier.numerics.dependent import depend, dependent
from coda_agent.verifier.numerics.error_gate import FEW, OutputError
from coda_agent.verifier.numerics.inputs import FAMILIES, ON_CPU, draw_free
from coda_agent.verifier.numerics.landmarks import BASES, near_values, places
from coda_agent.verifier.numerics.limits import ErrorLimits, of_stored, of_unrounded
from coda_agent.verifier.numerics.reference import Tensors
from coda_agent.verifier.numerics.search import search
from coda_agent.verifier.numerics.sizes import (
    LARGEST_ON_CPU,
    between,
    hidden,
    scaled,
    small_sizes,
    stretched,
    together,
)
from coda_agent.verifier.numerics.stretch import BEYOND, DEPENDENT, LANDMARKS, SEARCHED, STRETCHED, TURNS
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec

STORED = "as stored"
# number of draws of each stretched family; one draw is not enough, because the scales of two inputs may
# cancel
REPEATS = 6
# An output's error in fp64, as a share of its RMS, may not exceed this. Approximations that are as exact as
# fp32 are below 1e-6. The tanh form of GELU in place of its erf form gives 2e-4.
FORMULA = 1e-5
# The families in which formulas are compared: those of typical magnitudes. A series near 0, which may replace
# a form that cancels there, is less exact in the others.
TYPICAL = ("normal", "positive", "outliers", "low_rank")
KNOWN = (*FAMILIES, *ON_CPU, *BEYOND)  # every family
# families that run in turn at long extents if the program computes with sizes, which may act on an eps
SIZED = ("tiny", "zeros")
FEW_DIMS = 48  # largest extent in most runs of stretched families; most mistakes show at any size


class InputSettings(NamedTuple):
    """The sizes, family and seed that reproduce a run's inputs. ``long``: whether the error gate uses its
    limits for long extents. ``near``: for some inputs, numbers among which the families "searched" and
    "landmarks" draw values."""

    sizes: Mapping[str, int]
    family: str
    seed: int
    long: bool = False
    near: Mapping[str, Sequence[float]] = {}

    def __str__(self) -> str:
        alone = [f"{name} = {numbers[0]:.9g}, " for name, numbers in self.near.items() if len(numbers) == 1]
        return f"inputs {self.family!r}, {''.join(alone)}sizes {dict(self.sizes)}, seed {self.seed}"

    def draw(self, spec: Spec) -> dict[str, torch.Tensor]:
        """Draw the inputs, but for a backward only the forward's inputs and the incoming gradients."""
        if self.family == LANDMARKS:
            return near_values(spec, self.sizes, self.seed, self.near)
        if self.family == DEPENDENT:
            return dependent(spec, self.sizes, self.seed)
        if self.family == SEARCHED:
            return search(spec, self.sizes, self.seed, self.near)
        return draw_free(spec, self.sizes, self.seed, family=self.family)


def runs(spec: Spec, program: Program, seed: int) -> Iterator[InputSettings]:
    """Yield every run of the gate.

    Each family of inputs runs at its own hidden sizes (drawn at random). Each stretched family (inputs beyond
    the typical values) runs at several hidden sizes. The family "normal" also runs at each case's sizes
    scaled down. If the program computes with sizes or column numbers, every family runs at the scaled sizes.
    In addition, the family "normal" runs at the fixed small sizes, at each extent that a dim has in a case
    (with one of ``SIZED`` too, if the program computes with sizes), at extents between these, and once with
    all dims long. If an extent between these is below ``FEW``, the family "integers" replaces "normal". The
    family "integers" also runs once with a single row. With few values, statistics say little, but most
    results on integers are exact. Finally, inputs that depend on each other, and ``landmarks``, run at small
    sizes.
    """
    fresh = partial(Random(seed).getrandbits, 48)
    for sizes in small_sizes(spec):
        yield InputSettings(sizes, "normal", fresh())
    for turn, largest in enumerate((*[FEW_DIMS] * REPEATS, LARGEST_ON_CPU)):
        sizes = hidden(spec, fresh(), largest, vary=True)
        for family in STRETCHED:  # these runs are cheap and find most mistakes
            yield InputSettings(sizes, family, TURNS * fresh() + turn)  # ``turn`` picks a scalar's value
    for family in (*FAMILIES, *ON_CPU):
        yield InputSettings(hidden(spec, fresh(), LARGEST_ON_CPU, vary=True), family, fresh())
    yield InputSettings(hidden(spec, fresh(), LARGEST_ON_CPU, rows=1), "integers", fresh())
    sized = any(node.op in ("dim", "column_index") for node in program.nodes)
    for sizes in scaled(spec, fresh()):
        for family in (*FAMILIES, *STRETCHED, *ON_CPU) if sized else ("normal",):
            yield InputSettings(sizes, family, fresh(), long=True)
    for turn, sizes in enumerate(stretched(spec, fresh())):
        for family in ("normal", SIZED[turn % len(SIZED)]) if sized else ("normal",):
            yield InputSettings(sizes, family, fresh(), long=True)
    for sizes in together(spec, fresh()):
        yield InputSettings(sizes, "normal", fresh())
    sizes = hidden(spec, fresh(), FEW_DIMS, vary=True)
    for _ in range(REPEATS if depend(spec, sizes) else 0):
        yield InputSettings(sizes, DEPENDENT, fresh())
    for sizes, near in places(spec, program, fresh()):
        for base in range(len(BASES)):
            yield InputSettings(sizes, LANDMARKS, len(BASES) * fresh() + base, near=near)
    for dim, sizes in between(spec, fresh()):
        yield InputSettings(sizes, "integers" if sizes[dim] < FEW else "normal", fresh(), long=True)


class Comparison(NamedTuple):
    """A run's inputs, the truth in fp64, the reference in fp32, and the outputs that must be exact."""

    spec: Spec
    run: InputSettings
    inputs: Tensors
    truth: Tensors
    values: Tensors
    exact: frozenset[str]
    undefined: dict[str, float]  # see error_gate.undefined

    @classmethod
    def of(cls, spec: Spec, run: InputSettings) -> Comparison:
        """Compute a run's truth.

        Raises SpecError if the reference raises an error, or if a backward is not the gradient of its
        forward. Loading the spec cannot find all such faults, because it tries the reference and the gradient
        only at tiny sizes.
        """
        drawn = run.draw(spec)
        try:
            inputs = reference.finished(spec, drawn, run.sizes)
            truth, values = (of(spec, inputs, run.sizes) for of in (reference.oracle, reference.fp32))
        except reference.MISTAKES as error:
            message = f"its reference raises {type(error).__name__} on {run}: {error}"
            raise SpecError(f"spec {spec.name}", None, message) from error
        exact = exactness.exact_outputs(values, truth) if run.family == "integers" else frozenset()
        jittered = partial(reference.jittered, spec, inputs, run.sizes)
        undefined = error_gate.undefined(run.family, truth, values, jittered)
        # Gradients are not checked at long extents. Long extents can reveal a kernel's defects, but a spec's
        # formulas consist of PyTorch's functions, which are correct at every extent.
        off = {} if run.long else gradients.wrong(spec, drawn, run.sizes, run.family in BEYOND)
        for name, share in off.items():
            message = f"{name} is not the gradient of its forward: off by {share:.2g} of its RMS on {run}"
            raise SpecError(f"spec {spec.name}", None, message)
        return cls(spec, run, inputs, truth, values, exact, undefined)

    def errors(self, program: Program, watch: Watch | None = None) -> Iterator[tuple[str, list[OutputError]]]:
        """Yield the error gate's findings twice: for outputs as stored, then for unrounded outputs.

        In a family of ``limits.EXTREME``, unrounded outputs are judged only value by value. Undefined outputs
        are left out.
        """
        family, long = self.run.family, self.run.long
        wide = interpret(unrounded(program), self.inputs, watch, self.run.sizes)
        wide = {name: saturated(wide[name], output.dtype) for name, output in self.spec.outputs.items()}
        if _rounds_last(program):
            made = {name: rounded(wide[name], output.dtype) for name, output in self.spec.outputs.items()}
        else:
            made = interpret(program, self.inputs, watch, self.run.sizes)
        yield STORED, self._judged(self.spec, made, of_stored(family, long))
        errors = self._judged(error_gate.unrounded(self.spec), wide, of_unrounded(family, long))
        formulas = self.formulas(program)
        yield "not rounded", [error_gate.with_formula(error, formulas.get(error.name)) for error in errors]

    def formulas(self, program: Program) -> dict[str, float]:
        """The errors of the program's formulas, where they are too large: for each output, the RMS error of
        the program in fp64, as a share of the truth's RMS."""
        typical = self.run.family in TYPICAL
        if self.run.family == LANDMARKS:
            typical = BASES[self.run.seed % len(BASES)] in TYPICAL
        if self.run.long or not typical:
            return {}
        made = interpret(program, self.inputs, sizes=self.run.sizes, wide=torch.float64)
        shares = {}
        for name, output in self.spec.outputs.items():
            finite = self.truth[name].isfinite() & self.values[name].isfinite()
            truth, value = self.truth[name][finite], saturated(made[name], output.dtype)[finite]
            shares[name] = float((value - truth).norm() / truth.norm().clamp_min(2.0**-900))
        return {name: share for name, share in shares.items() if not share <= FORMULA}

    def passes(self, program: Program, watch: Watch) -> bool:
        """Whether all outputs of the program pass the error gate. ``watch``: a callback for the
        interpreter."""
        return all(error.passed for _, errors in self.errors(program, watch) for error in errors)

    def _judged(self, spec: Spec, made: Tensors, limits: ErrorLimits) -> list[OutputError]:
        yard = {name: self.values[name].to(DTYPES[output.dtype]) for name, output in spec.outputs.items()}
        errors = error_gate.compare(spec, made, self.truth, yard, limits, self.exact)
        return error_gate.counted(errors, made, self.undefined)


def unrounded(program: Program) -> Program:
    """The program with its outputs in fp32. If a matmul reads an output, the program keeps two forms of the
    output: the rounded form for the matmul, and the unrounded form under the output's name."""
    nodes, outputs = list(program.nodes), dict(program.outputs)
    types = {name: tensor._replace(dtype="fp32") for name, tensor in program.signature.outputs.items()}
    for name in _handed_on(program):
        read = f"{name} for a matmul"
        types[read], outputs[read] = program.signature.outputs[name], outputs[name]
        outputs[name] = len(nodes)
        nodes.append(nodes[outputs[read]])
    signature = program.signature._replace(outputs=types, updates={})
    return program._replace(signature=signature, nodes=tuple(nodes), outputs=outputs)


def _rounds_last(program: Program) -> bool:
    """Whether no value depends on a rounded value of the program, so that outputs may be rounded at the
    end."""
    steps = cut(program)
    vectors = [dtype for node, dtype in steps.dtypes.items() if steps.types[node].kind == "vector"]
    return len(steps.gemms) == 1 and set(vectors) <= {"fp32"}


def _handed_on(program: Program) -> list[str]:
    """The names of the outputs that a matmul of the program reads in their rounded form."""
    operands = {untransposed(program, a) for n in program.nodes if n.op == "gemm" for a in n.args}
    return [name for name, index in program.outputs.items() if index in operands]
