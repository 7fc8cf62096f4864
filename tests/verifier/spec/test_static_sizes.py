"""Tests of static dims: the sizes at which a kernel is tried, and specs that allow only some sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from authoring import SPECS, program_of
from spec_files import write_changed

from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.signature import Signature
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.sizes import hidden
from coda_agent.verifier.report import Checked
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import check

TEXT = """\
name: head_norm
summary: Each head divided by its RMS.
dims: {M: tokens, K: inner, H: heads, P: pairs}
inputs:
  x: {shape: [M, K], dtype: bf16, domain: finite}
  w: {shape: [2*H*P, K], dtype: bf16, init: {normal: {std: K**-0.5}}, domain: finite}
static: [P]
outputs:
  y: {shape: [M, 2*H*P], dtype: bf16}
reference: |
  heads = (x @ w.mT).unflatten(1, (H, 2 * P))
  y = (heads * rsqrt((heads * heads).mean(-1, keepdim=True) + 1e-6)).flatten(1)
cases:
  - {name: a, M: 4096, K: 1024, H: 16, P: 64}
  - {name: ragged, M: 1000, K: 520, H: 3, P: 64, bench: false}
"""
ONLY = ("static: [P]\n", "static: [P]\nonly: {P: [64]}\n")
KERNEL = """\
from primitives import gemm, head_sums, kernel, per_head, rsqrt


@kernel
def head_norm(x, w, P):
    \"\"\"Norm each head.\"\"\"
    t = gemm(x, w.mT)
    return {"y": t * per_head(rsqrt(head_sums(t * t, 2 * P) / WIDTH + 1e-6))}
"""


def made(folder: Path, old: str = "", new: str = "") -> Spec:
    return load(write_changed(folder / "head_norm.yaml", TEXT, old, new))


def drawn(spec: Spec) -> list[dict[str, int]]:
    return [hidden(spec, seed, 320, vary=True) for seed in range(60)]


def test_half_of_the_sizes_are_static_sizes_of_no_case(tmp_path: Path) -> None:
    sizes = [s["P"] for s in drawn(made(tmp_path))]
    assert 15 < sum(size == 64 for size in sizes) < 45
    assert len(set(sizes)) > 5 and max(sizes) == 64


def test_several_static_dims_have_unrelated_ratios() -> None:
    spec = load(SPECS / "gemm_rmsnorm_qkv_norm_rope.yaml", check=False)
    ratios = {(s["H"] / s["G"], s["P"] / s["G"]) for s in drawn(spec)}
    assert len(ratios - {(c.sizes["H"] / c.sizes["G"], c.sizes["P"] / c.sizes["G"]) for c in spec.cases}) > 15


def test_a_gpu_tries_the_static_sizes_of_the_cases() -> None:
    spec = load(SPECS / "gemm_rope.yaml", check=False)
    known = {case.sizes["P"] for case in spec.cases}
    assert {hidden(spec, seed)["P"] for seed in range(20)} <= known


@pytest.mark.slow
@pytest.mark.usefixtures("told_resources")
def test_a_literal_width_is_right_only_if_the_spec_allows_no_other(tmp_path: Path) -> None:
    literal, general = (KERNEL.replace("WIDTH", width) for width in ("128", "(2 * P)"))
    spec, bound = made(tmp_path), made(tmp_path, *ONLY)
    assert check(spec, literal).report.status == "rejected"
    assert isinstance(check(spec, general).report, Checked)
    report = check(bound, literal).report
    assert isinstance(report, Checked)
    findings = [words for gate in report.gates for words in gate.findings]
    assert "checked only where P is 64: a launch refuses other sizes" in findings


def test_other_sizes_than_the_allowed_ones_are_refused_at_a_launch(tmp_path: Path) -> None:
    spec = made(tmp_path, *ONLY)
    program = program_of(spec, KERNEL.replace("WIDTH", "128"))
    assert Signature.from_json(program.signature.to_json()) == program.signature
    for heads, width in ((2, 128), (4, 64)):
        inputs = {"x": torch.ones(4, 8).bfloat16(), "w": torch.ones(heads * width, 8).bfloat16()}
        if width == 128:
            assert interpret(program, inputs, sizes={"P": 64})["y"].shape == (4, 256)
            continue
        with pytest.raises(ValueError, match="P is 32; the spec of head_norm allows only 64"):
            interpret(program, inputs, sizes={"P": 32})


def test_only_changes_the_hash_and_its_absence_does_not(tmp_path: Path) -> None:
    free, bound = made(tmp_path), made(tmp_path, *ONLY)
    assert free.hash != bound.hash and "only" not in free.signature().to_json()


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("{H: [16]}", "only names 'H'; it may name only static dims"),
        ("{P: []}", r"only gives P the sizes \[\]; list positive sizes"),
        ("{P: [0, 64]}", r"only gives P the sizes \[0, 64\]; list positive sizes"),
        ("{P: [32]}", "case 'a': P is 64; only allows 32"),
        ("{P: 64}", "must be a list"),
    ],
)
def test_sizes_that_do_not_fit_the_spec(tmp_path: Path, only: str, words: str) -> None:
    change: Any = (ONLY[0], f"{ONLY[0]}only: {only}\n")
    with pytest.raises(SpecError, match=words):
        made(tmp_path, *change)
