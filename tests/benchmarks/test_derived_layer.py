"""The layer with a derived backward, interpreted: its gradients are the plain layer's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from benchmarks import derived_layer
from coda_agent.comparison.layers.errors import relative, results, truth
from coda_agent.comparison.layers.fused import unrotated
from coda_agent.comparison.layers.runners import Interpreted, accepted
from coda_agent.comparison.layers.shape import Shape, draw
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program

SMALL = Shape(heads=2, head_width=16, ffn=48, sequences=2, length=24)


def call(program: Program, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return interpret(program, inputs)


def test_gradients_are_the_plain_layers() -> None:
    drawn = draw(SMALL, 5, "cpu")
    kernels = Interpreted(accepted(Path("generated_kernels"), SMALL))
    given = (SMALL, drawn.weights, drawn.next_norm, kernels, unrotated)
    one_pass, derived = derived_layer.OnePass(*given), derived_layer.ByDerivation(*given)
    programs = derived_layer.backwards(SMALL)
    derived_layer.by_derivation(derived, programs, lambda program: partial(call, program))
    exact = truth(SMALL, drawn)
    for layer in (one_pass, derived):
        assert max(relative(results(layer, drawn), exact).values()) < 0.01
