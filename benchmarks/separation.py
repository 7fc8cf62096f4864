"""Measure the error gate on right and wrong results: ``python -m benchmarks.separation [--json] [SPEC ...]``.

The benchmark runs on an H100, for every accepted kernel, or for the kernels of the named specs. Inputs of all
families are drawn, at the spec's case ``decode`` and at hidden (random) sizes. A mutant is the reference with
one mistake: in an output, in a matmul or in the reference's text. For the kernel and for each mutant, the
benchmark computes the largest ratio of an error to its limit. The benchmark prints the kernel's ratio, and
the smallest of the mutants' ratios.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.system.files import KERNELS, SPECS
from coda_agent.verifier.gpu.telemetry import device
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.error_gate import OutputError
from coda_agent.verifier.numerics.inputs import FAMILIES
from coda_agent.verifier.numerics.limits import ErrorLimits
from coda_agent.verifier.numerics.sizes import hidden, small_sizes
from coda_agent.verifier.numerics.strength import mutation_score
from coda_agent.verifier.numerics.strength.mutants import mutants
from coda_agent.verifier.numerics.strength.mutation_score import MutationSample
from coda_agent.verifier.spec.model import Spec

CLEAR = 100.0  # a mutant is not run again once its error is this many times the limit
Sizes = Mapping[str, int]


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    named = [a for a in arguments if a != "--json"]
    paths = sorted(KERNELS.glob("*.program.json"))
    names = named or [p.name.partition(".")[0] for p in paths]
    rows = {name: separation(name) for name in names}
    if as_json:
        print(json.dumps({"where": device(), "specs": rows}, indent=1))
        return
    print(device())
    for name, row in rows.items():
        least, slip = min((worst, slip) for slip, worst in row["mutants"].items())
        print(f"{name}: {row['honest']:.2f}; of {len(row['mutants'])} mutants the least {least:.3g} ({slip})")


def separation(name: str) -> dict[str, Any]:
    """The largest ratio of an error to its limit, for the kernel and for each mutant, over all families of
    inputs and all sizes. Once the ratio of a mutant reaches ``CLEAR``, the mutant is not run again."""
    spec = load(SPECS / f"{name}.yaml", check=False)
    text = (KERNELS / f"{name}.program.json").read_text(encoding="utf-8")
    program = Program.from_json(text, spec.signature())
    made, small = list(mutants(spec)), small_sizes(spec)[0]
    # A run on the CPU finds the mutants that crash, because a bad index on a GPU would end the process.
    tried = MutationSample.of(spec, small, 0, "normal")
    honest, wrong = 0.0, {m.name: math.inf if tried.made(m) is None else 0.0 for m in made}
    for seed, sizes in enumerate(_sizes(spec)):
        plans = list(_plans(program, sizes))
        for family in FAMILIES:
            trial = MutationSample.of(spec, sizes, seed, family, "cuda")
            honest = max(honest, *(_excess(trial, plan(trial.inputs)) for plan in plans))
            for mutant in made:
                if wrong[mutant.name] < CLEAR:
                    share = _excess(trial, trial.made(mutant), mutant.spoken)
                    wrong[mutant.name] = max(wrong[mutant.name], share)
    names = [m.name for m in made if wrong[m.name] > 1 or mutation_score.differs(spec, m, small)]
    return {"honest": honest, "mutants": {name: wrong[name] for name in names}}


def _excess(trial: MutationSample, got: Mapping[str, Any] | None, spoken: bool = False) -> float:
    """The largest ratio of an output's error to its limit. The ratio is infinite for a wrong shape, a
    wrong NaN or infinity, or a wrong output that must be bit-exact. ``spoken``: a program could express the
    mutant, so the errors of unrounded outputs count too."""
    if got is None:
        return math.inf
    factor = trial.spec.tolerance.factor if trial.spec.tolerance else 1.0
    return max(_share(*found, factor) for found in trial.errors(got, spoken))


def _share(error: OutputError, dtype: str, limits: ErrorLimits, factor: float) -> float:
    """The largest ratio of an error to its limit. The slope of the output over the truth counts only if the
    error gate rejected the slope, because the gate widens the slope's limit for small samples."""
    ratios = error.rms_ratio, error.tile_ratio, error.element_ratio
    share = max(r / limit for r, limit in zip(ratios, limits.ratios(dtype), strict=True)) / factor
    if error.passed or share > 1:
        return share
    return abs(error.slope - 1) / limits.slope if "slope" in error.reason else math.inf


def _sizes(spec: Spec) -> Iterator[Sizes]:
    yield next((c.sizes for c in spec.cases if c.name == "decode"), spec.cases[-1].sizes)
    yield hidden(spec, 20261121)


def _plans(program: Program, sizes: Sizes) -> Iterator[Plan]:
    gemms = lower(program).gemms
    for probe in PROBES:
        if all(g.admits(probe, sizes) for g in gemms):
            yield Plan(KernelSource(program, {g.step: probe for g in gemms}), sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
