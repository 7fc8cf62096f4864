"""The interpret gate's runs: fresh inputs and sizes, honest kernels, and mathematics that is almost right."""

from __future__ import annotations

import pytest
from authoring import KERNELS, SPECS, TOY_KERNEL, UNSCALED, program_of, write_toy

from verifier.gates import Failed
from verifier.inputs import FAMILIES
from verifier.interpreted import EXTREME, STORED, Run, judged, runs
from verifier.sizes import small_sizes
from verifier.spec import Spec, load
from verifier.verify import _interpret


def spec_of(name: str) -> Spec:
    return load(SPECS / f"{name}.yaml", check=False)


def faults(spec: Spec, source: str, run: Run) -> dict[str, set[str]]:
    """How judged, and the outputs that failed so."""
    found = judged(spec, program_of(spec, source), run)
    return {how: {e.name for e in errors if not e.passed} for how, errors in found}


def test_every_family_has_sizes_of_its_own() -> None:
    spec = spec_of("gemm_rmsnorm_swiglu")
    drawn = list(runs(spec, 5))
    assert drawn == list(runs(spec, 5)) and drawn != list(runs(spec, 6))
    assert {run.family for run in drawn} == set(FAMILIES)
    assert [dict(run.sizes) for run in drawn[:2]] == small_sizes(spec)
    assert drawn[-1].sizes["M"] == 1
    assert len({tuple(run.sizes.values()) for run in drawn}) == len(drawn) == len(FAMILIES) + 3
    assert len({run.seed for run in drawn}) == len(drawn)


@pytest.mark.parametrize(
    "name", ["gemm_swiglu_mlp", "gemm_residual_rmsnorm_gemm_bwd", "gemm_gelu_bwd", "gemm_fp8_row_scale"]
)
def test_honest_kernels_pass_in_every_run(name: str) -> None:
    spec, source = spec_of(name), (KERNELS / f"{name}.py").read_text()
    for run in runs(spec, 1):
        found = faults(spec, source, run)
        assert not any(found.values()) and ("not rounded" in found) == (run.family not in EXTREME), run


GELU = """\
from primitives import gemm, kernel, per_column, tanh
@kernel
def gemm_bias_gelu(x, w, bias):
    z = gemm(x, w.mT) + per_column(bias)
    return {"preact": z, "act": 0.5 * z * (1 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.044715", "0.0447"), ("0.7978845608028654", "0.7979"), ("0.5 * z", "0.50001 * z")],
)
def test_mathematics_almost_right_is_seen_unrounded(old: str, new: str) -> None:
    spec = spec_of("gemm_bias_gelu")
    run = Run(small_sizes(spec)[0], "normal", 3)
    assert faults(spec, GELU, run) == {STORED: set(), "not rounded": set()}
    assert faults(spec, GELU.replace(old, new), run) == {STORED: set(), "not rounded": {"act"}}


def test_a_failure_can_be_had_again(tmp_path) -> None:
    spec = load(write_toy(tmp_path))
    with pytest.raises(Failed) as caught:
        _interpret(spec, program_of(spec, UNSCALED), {})
    words = caught.value.message
    assert words.startswith(
        "in the interpreter, inputs 'normal', sizes {'M': 264, 'K': 304, 'N': 344}, seed "
    )
    seed = int(words.partition("seed ")[2].partition(",")[0])
    again = Run(small_sizes(spec)[0], "normal", seed)
    (_, errors), _ = judged(spec, program_of(spec, UNSCALED), again)
    assert errors[0].reason in words
    assert faults(spec, TOY_KERNEL, again) == {STORED: set(), "not rounded": set()}
