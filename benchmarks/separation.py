"""The error gate's separation of right and wrong: ``python -m benchmarks.separation [--json] [SPEC ...]``.

On an H100. For every accepted kernel (or those named), over all families of inputs, at its ``decode`` case
and at hidden sizes: how near the kernel itself comes to a limit (1 is the limit), and how far beyond one each
mutant of the reference goes, which has an output, a matmul or its text wrong by one slip.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from primitives.compile import PROBES
from primitives.ir import Program
from primitives.lower import lower
from primitives.plan import Plan
from verifier import numerics, reference
from verifier.conditions import device
from verifier.inputs import DTYPES, FAMILIES, draw
from verifier.limits import Limits, of_stored, of_unrounded
from verifier.mutants import Mutant, mutants
from verifier.numerics import OutputError
from verifier.sizes import hidden, small_sizes
from verifier.spec import Spec
from verifier.spec_file import load

ROOT = Path(__file__).resolve().parents[1]
Sizes = Mapping[str, int]


def main(arguments: list[str]) -> None:
    as_json = "--json" in arguments
    named = [a for a in arguments if a != "--json"]
    paths = sorted((ROOT / "generated_kernels").glob("*.program.json"))
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
    """The kernel's worst over families and sizes, and each mutant's: its best family counts for it."""
    spec = load(ROOT / "specs" / f"{name}.yaml", check=False)
    text = (ROOT / "generated_kernels" / f"{name}.program.json").read_text(encoding="utf-8")
    program = Program.from_json(text, spec.signature())
    honest, wrong = 0.0, dict.fromkeys((m.name for m in mutants(spec)), 0.0)
    for seed, sizes in enumerate(_sizes(spec)):
        for family in FAMILIES:
            gate = _Gate(spec, sizes, draw(spec, sizes, seed, device="cuda", family=family), family)
            honest = max(honest, *(gate.excess(plan(gate.inputs)) for plan in _plans(program, sizes)))
            for mutant in mutants(spec):
                wrong[mutant.name] = max(wrong[mutant.name], gate.mutant(mutant))
    small = small_sizes(spec)[0]
    names = [m.name for m in mutants(spec) if wrong[m.name] > 1 or numerics.differs(spec, m, small)]
    return {"honest": honest, "mutants": {name: wrong[name] for name in names}}


class _Gate:
    """The error gate on one draw of inputs."""

    def __init__(self, spec: Spec, sizes: Sizes, inputs: Mapping[str, Any], family: str):
        self.spec, self.sizes, self.inputs, self.family = spec, sizes, inputs, family
        self.truth = reference.oracle(spec, inputs, sizes)
        self.values = reference.fp32(spec, inputs, sizes)
        self.exact = numerics.exact_outputs(self.values, self.truth) if family == "integers" else frozenset()

    def mutant(self, mutant: Mutant) -> float:
        """Its excess as stored; what a program could say is seen unrounded by the interpreter, too."""
        try:
            got = reference.fp32(self.spec, self.inputs, self.sizes, mutant.text, mutant.product)
        except reference.MISTAKES:
            return math.inf
        got = mutant.after(got)
        if any(got[name].shape != self.truth[name].shape for name in got):
            return math.inf
        stored = self.excess(got)
        if not mutant.spoken:
            return stored
        return max(stored, self._share_of(numerics.unrounded(self.spec), got, of_unrounded(self.family)))

    def excess(self, got: Mapping[str, Any]) -> float:
        """The greatest share that an output has of a limit, infinite where a bit or a NaN is wrong."""
        return self._share_of(self.spec, got, of_stored(self.family))

    def _share_of(self, spec: Spec, got: Mapping[str, Any], limits: Limits) -> float:
        stored, yard = (
            {name: t[name].to(DTYPES[o.dtype]) for name, o in spec.outputs.items()}
            for t in (got, self.values)
        )
        errors = numerics.compare(spec, stored, self.truth, yard, limits, self.exact)
        return max(_share(spec, error, limits) for error in errors)


def _share(spec: Spec, error: OutputError, limits: Limits) -> float:
    """Of the nearest limit; of the slope's, which small samples widen, only where it was what failed."""
    dtype = spec.outputs[error.name].dtype
    factor = spec.tolerance.factor if spec.tolerance else 1.0
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
            yield Plan(program, sizes, {g.step: probe for g in gemms})


if __name__ == "__main__":
    main(sys.argv[1:])
