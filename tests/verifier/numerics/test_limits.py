"""One module defines the limits of the error gate for each family. The interpreter, the GPU checks and the
search for weak spots all apply these limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from authoring import KERNELS, program_of
from checkout import ROOT

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.verifier.gpu.checks import InputDraw, KernelCase
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate, reference
from coda_agent.verifier.numerics.cpu_numerics import Comparison, InputSettings
from coda_agent.verifier.numerics.inputs import FAMILIES, ON_CPU
from coda_agent.verifier.numerics.limits import (
    EXTREME,
    FEW,
    SPIKES,
    USUAL,
    VALUES,
    ErrorLimits,
    of_stored,
    of_unrounded,
)
from coda_agent.verifier.numerics.strength import mutation_score
from coda_agent.verifier.numerics.strength.mutants import ReferenceMutant
from coda_agent.verifier.numerics.strength.mutation_score import MutationSample
from coda_agent.verifier.spec.model import Spec

NAME = "gemm_rmsnorm_swiglu"
SIZES = {"M": 40, "D": 24, "F": 32}


@pytest.fixture(scope="module")
def spec() -> Spec:
    return load(ROOT / "specs" / f"{NAME}.yaml", check=False)


@contextmanager
def allowed() -> Iterator[list[ErrorLimits]]:
    """Yield a list. Each comparison in the ``with`` block appends its limits to this list."""
    found: list[ErrorLimits] = []
    compare = error_gate.compare

    def noted(
        spec: Spec, got: Any, truth: Any, yard: Any, limits: ErrorLimits = USUAL, exact: Any = ()
    ) -> Any:
        found.append(limits)
        return compare(spec, got, truth, yard, limits, exact)

    with mock.patch.object(error_gate, "compare", noted):
        yield found


@pytest.mark.parametrize("family", [*FAMILIES, *ON_CPU])
def test_the_interpreter_the_gpu_and_the_search_for_weak_spots_allow_the_same(
    spec: Spec, family: str
) -> None:
    program = program_of(spec, (KERNELS / f"{NAME}.py").read_text())
    with allowed() as interpreter:
        assert all(
            e.passed
            for _, errors in Comparison.of(spec, InputSettings(SIZES, family, 0)).errors(program)
            for e in errors
        )
    trial = MutationSample.of(spec, SIZES, 0, family)
    with allowed() as search:
        assert trial.passes(ReferenceMutant("none", spec.reference))
    assert search == interpreter == [of_stored(family), of_unrounded(family)]
    if family in FAMILIES:
        drawn = InputDraw.__new__(InputDraw)  # skips __init__, which draws inputs on a GPU
        yard = reference.yardstick(spec, trial.inputs, SIZES)
        drawn.__dict__.update(job=KernelCase(spec, KernelSource(program), "any", SIZES), family=family)
        drawn.__dict__.update(truth=trial.truth, yardstick=yard, exact=trial.exact, seed=0)
        plan: Any = SimpleNamespace(schedules={})
        with allowed() as gpu:
            drawn.judge(plan, yard)
        assert gpu == interpreter[:1]


def test_what_each_family_is_allowed() -> None:
    assert {of_stored(family) for family in FAMILIES} == {USUAL}  # the limits of reported errors
    assert of_stored("spikes") == of_stored("spikes", long=True) == SPIKES
    assert of_stored("normal", long=True) == FEW
    assert {f for f in (*FAMILIES, *ON_CPU) if of_unrounded(f) == VALUES} == set(EXTREME)


def test_what_no_program_could_say_is_left_to_the_families_of_a_gpu(spec: Spec) -> None:
    """The mutant ``spoilt`` has an error that no program in the vocabulary can have. Only compiled code could
    have such an error, and code runs only on a GPU. GPU runs draw no family of ``ON_CPU``, so these families
    must not judge ``spoilt``."""
    spoilt = ReferenceMutant(
        "spoilt", spec.reference, after=lambda outputs: {k: t for k, t in outputs.items()}
    )
    said = ReferenceMutant("said", spec.reference + "\nact = 2 * act")
    families: list[str] = []
    honest = MutationSample.passes

    def shown_on_a_cpu(trial: MutationSample, mutant: ReferenceMutant) -> bool:
        families.append(trial.family)
        return honest(trial, mutant) and trial.family not in ON_CPU

    with (
        mock.patch.object(mutation_score, "mutants", lambda _: iter((spoilt, said))),
        mock.patch.object(MutationSample, "passes", shown_on_a_cpu),
    ):
        assert mutation_score.weak_spots(spec, SIZES) == ["spoilt"]
    assert set(families) == set(FAMILIES)
