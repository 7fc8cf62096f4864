"""Tests of outputs that say nothing about a program: a spec with one is refused when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.file import SpecError

SPEC = """\
name: judged
summary: A test.
dims: {M: tokens, K: inner, N: width}
inputs:
  x: {shape: [M, K], dtype: bf16}
  w: {shape: [N, K], dtype: bf16, init: {normal: {std: K**-0.5}}}
outputs:
  y: {shape: [M, N], dtype: bf16}
reference: |
  t = x @ w.mT
  y = VALUE
cases:
  - {name: a, M: 256, K: 128, N: 512}
accept: {speedup: 1.0}
"""


def loaded(folder: Path, value: str) -> None:
    path = folder / "judged.yaml"
    path.write_text(SPEC.replace("VALUE", value), encoding="utf-8")
    load(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("t * 0", "'y' depends on no input"),
        ("gelu(t - t)", "'y' depends on no input"),
        ("(t + 1e6) - 1e6", "in fp32, output 'y' is off by 0.0"),
        ("1 - cos(t * 1e-4)", "in fp32, output 'y' is off by "),
        ("exp(300 * t) / exp(300 * t).sum(-1, keepdim=True)", "in fp32, output 'y' is not finite on typical"),
        ("sigmoid(t.softmax(-1).sum(-1, keepdim=True).round() * ones_like(t))", "'y' depends on no input"),
        ("sqrt(-1 - t * t)", "'y' has no finite value"),
        ("t / 0", "'y' has no finite value"),
    ],
)
def test_an_output_that_says_nothing_is_refused(value: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=words):
        loaded(tmp_path, value)


@pytest.mark.parametrize("value", ["t", "where(t > 0, t, float('nan'))", "(t > 0).to(t.dtype)", "log(t)"])
def test_an_output_that_says_something_is_judged(value: str, tmp_path: Path) -> None:
    loaded(tmp_path, value)
