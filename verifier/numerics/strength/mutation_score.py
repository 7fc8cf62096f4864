"""Test whether a spec is strong enough: each of its mutants must fail a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from coda_agent.verifier.numerics import error_gate, exactness, reference
from coda_agent.verifier.numerics.error_gate import OutputError
from coda_agent.verifier.numerics.inputs import FAMILIES, ON_CPU, draw
from coda_agent.verifier.numerics.limits import ErrorLimits, of_stored, of_unrounded
from coda_agent.verifier.numerics.reference import Tensors
from coda_agent.verifier.numerics.strength.mutants import ReferenceMutant, mutants
from coda_agent.verifier.numerics.values import DTYPES, Sizes
from coda_agent.verifier.spec.model import Spec

SAME = 1e-12  # largest relative difference between two correct ways to compute a value in fp64


def weak_spots(spec: Spec, sizes: Sizes, seed: int = 0) -> list[str]:
    """Names of the mutants that pass the gates at these sizes in every family of inputs.

    A mutant that a program can express is judged as in the interpret gate, in the same families and with the
    same limits. Any other mutant is judged as in the numerics gate on a GPU, which has fewer families. The
    list is empty for a strong spec. Small sizes on a CPU suffice. If a mutant's fp64 results equal the
    reference's in every family, apart from rounding, the mutant is left out of the list.
    """
    left = list(mutants(spec))
    for family in (*FAMILIES, *ON_CPU):
        trial = MutationSample.of(spec, sizes, seed, family)
        left = [m for m in left if family in ON_CPU and not m.spoken or trial.passes(m)]
    return [mutant.name for mutant in left if differs(spec, mutant, sizes, seed)]


def differs(spec: Spec, mutant: ReferenceMutant, sizes: Sizes, seed: int = 0) -> bool:
    """Whether the mutant's results differ from the reference's in some family of inputs."""
    return any(
        MutationSample.of(spec, sizes, seed, family).differs(mutant) for family in (*FAMILIES, *ON_CPU)
    )


@dataclass(frozen=True)
class MutationSample:
    """One draw of inputs, and the reference's results for these inputs, on which mutants are judged."""

    spec: Spec
    sizes: Sizes
    family: str
    inputs: Tensors
    truth: Tensors
    values: Tensors
    exact: frozenset[str]

    @classmethod
    def of(cls, spec: Spec, sizes: Sizes, seed: int, family: str, device: str = "cpu") -> MutationSample:
        inputs = draw(spec, sizes, seed, device=device, family=family)
        truth, values = reference.oracle(spec, inputs, sizes), reference.fp32(spec, inputs, sizes)
        exact = exactness.exact_outputs(values, truth) if family == "integers" else frozenset()
        return cls(spec, sizes, family, inputs, truth, values, exact)

    def passes(self, mutant: ReferenceMutant) -> bool:
        """Whether the gates pass the mutant."""
        got = self.made(mutant)
        return got is not None and all(e.passed for e, _, _ in self.errors(got, mutant.spoken))

    def made(self, mutant: ReferenceMutant) -> Tensors | None:
        """The mutant's outputs. None if the mutant raises an error or an output has a wrong shape, because
        every gate would reject such a mutant."""
        try:
            got = reference.fp32(self.spec, self.inputs, self.sizes, mutant.text, mutant.product)
        except reference.MISTAKES:
            return None
        got = mutant.after(got)
        return got if all(got[name].shape == true.shape for name, true in self.truth.items()) else None

    def errors(self, got: Tensors, spoken: bool = False) -> Iterator[tuple[OutputError, str, ErrorLimits]]:
        """Yield each output's error, the output's dtype, and the limits on the error. First judge outputs as
        they are stored. If a program can express the mutant (``spoken``), also judge the unrounded outputs,
        with the interpret gate's limits for unrounded outputs."""
        judged = [(self.spec, of_stored(self.family))]
        if spoken:
            judged.append((error_gate.unrounded(self.spec), of_unrounded(self.family)))
        for spec, limits in judged:
            stored, yard = (
                {name: tensors[name].to(DTYPES[o.dtype]) for name, o in spec.outputs.items()}
                for tensors in (got, self.values)
            )
            for error in error_gate.compare(spec, stored, self.truth, yard, limits, self.exact):
                yield error, spec.outputs[error.name].dtype, limits

    def differs(self, mutant: ReferenceMutant) -> bool:
        """Whether the mutant computes another function than the reference. Always True for a mutant that no
        program can express. Such a mutant has the reference's text, but executes the text wrongly."""
        other = reference.oracle(self.spec, self.inputs, self.sizes, mutant.text)
        same = all(torch.allclose(other[n], t, SAME, 0.0, equal_nan=True) for n, t in self.truth.items())
        return not same or not mutant.spoken
