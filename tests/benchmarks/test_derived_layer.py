"""Tests of the layer with a derived backward: the interpreted backward gives the plain layer's gradients."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from benchmarks.by_hand.layer import unrotated
from benchmarks.by_hand.runners import Interpreted, accepted_programs
from benchmarks.derived import layer
from coda_agent.comparison.competitors import COMPILE, PROGRAM
from coda_agent.comparison.layers.errors import relative, results, truth
from coda_agent.comparison.layers.shape import Shape, draw
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program

SMALL = Shape(heads=2, head_width=16, ffn=48, sequences=2, length=24)


def call(program: Program, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    return interpret(program, inputs)


def test_gradients_are_the_plain_layers() -> None:
    drawn = draw(SMALL, 5, "cpu")
    kernels = Interpreted(accepted_programs())
    given = (SMALL, drawn.weights, drawn.next_norm, kernels, unrotated)
    one_pass, derived = layer.OnePass(*given), layer.ByDerivation(*given)
    programs = layer.backwards(SMALL)
    layer.by_derivation(derived, programs, lambda program: partial(call, program))
    exact = truth(SMALL, drawn)
    for each in (one_pass, derived):
        assert max(relative(results(each, drawn), exact).values()) < 0.01


def test_the_page_has_medians_and_ratios() -> None:
    arms = (PROGRAM, layer.ONE_PASS, COMPILE, layer.DERIVED)
    times = {f"{arm}: {part}": [2.0] * 10 for arm in arms for part in layer.PASSES}
    times |= {f"{layer.DERIVED}: backward": [1.0] * 10, layer.ATTENTION: [0.5] * 10}
    where = {"gpu": "a GPU", "torch": "1", "cuda": "2"}
    entry = {"date": "2026-01-01T", "where": where, "times": times, "agreement": {"derived": {"d x": 0.01}}}
    page = layer.page({"1B": entry})
    assert "| 1B | backward | 2.000 | 2.000 | 2.000 | 1.000 | 2.000 [2.000, 2.000] | 2.000" in page
    assert "| 1B | 0.500 | 1.500 | 1.500 | 1.000 |" in page and "| 1B | derived | d x | 0.0100 |" in page


def test_the_committed_page_is_drawn_from_its_samples() -> None:
    found = json.loads(Path("docs/layer_derived.json").read_text(encoding="utf-8"))
    assert Path("docs/layer_derived.md").read_text(encoding="utf-8") == layer.page(found)
