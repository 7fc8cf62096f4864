"""Tests of the runs that the interpret gate makes. The runs have new inputs and sizes. Honest kernels pass
every run, and a kernel whose mathematics is only almost right fails a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from authoring import KERNELS, SPECS, TOY_KERNEL, UNSCALED, activation, program_of, write_toy

from coda_agent.verifier.gates import Failed
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate
from coda_agent.verifier.numerics.cpu_numerics import REPEATS, STORED, Comparison, InputSettings, runs
from coda_agent.verifier.numerics.inputs import FAMILIES, ON_CPU, draw
from coda_agent.verifier.numerics.sizes import small_sizes
from coda_agent.verifier.numerics.stretch import LANDMARKS, STRETCHED, TURNS
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import _interpret

pytestmark = pytest.mark.slow


def spec_of(name: str) -> Spec:
    return load(SPECS / f"{name}.yaml", check=False)


def faults(spec: Spec, source: str, run: InputSettings) -> dict[str, set[str]]:
    """Return the names of the outputs that fail, once as judged after rounding (``STORED``) and once as
    judged before rounding."""
    found = Comparison.of(spec, run).errors(program_of(spec, source))
    return {how: {e.name for e in errors if not e.passed} for how, errors in found}


def test_every_family_has_sizes_of_its_own() -> None:
    spec = spec_of("gemm_rmsnorm_swiglu")
    program = program_of(spec, SWIGLU)
    drawn = list(runs(spec, program, 5))
    assert drawn == list(runs(spec, program, 5)) and drawn != list(runs(spec, program, 6))
    assert {run.family for run in drawn} == {*FAMILIES, *STRETCHED, *ON_CPU, LANDMARKS}
    assert [dict(run.sizes) for run in drawn[:2]] == small_sizes(spec)
    far = [run for run in drawn if run.family in STRETCHED]
    assert len({tuple(run.sizes.values()) for run in far}) == len(far) / len(STRETCHED) == REPEATS + 1
    assert [run.seed % TURNS for run in far if run.family == "ends"] == list(range(REPEATS + 1))
    drawn = [run for run in drawn if run not in far and run.family != LANDMARKS]
    assert len({run.seed for run in drawn}) == len(drawn)
    end = next(i for i, run in enumerate(drawn) if run.sizes["M"] == 1) + 1
    assert len({tuple(run.sizes.values()) for run in drawn[:end]}) == end == len(FAMILIES | ON_CPU) + 3
    wide = next(i for i, run in enumerate(drawn) if min(run.sizes.values()) >= 376)
    assert max(drawn[wide].sizes.values()) <= 1024
    long, between = drawn[end:wide], drawn[wide + 1 :]
    assert len(between) > 50 and all(run.long for run in (*long, *between))
    assert {run.family for run in between if min(run.sizes.values()) >= 32} == {"normal"}
    assert {name: {run.sizes[name] for run in long if run.sizes[name] > 350} for name in spec.dims} == {
        name: {case.sizes[name] for case in spec.cases} - {128} for name in spec.dims
    }


@pytest.mark.parametrize(
    "name", ["gemm_swiglu_mlp", "gemm_residual_rmsnorm_gemm_bwd", "gemm_gelu_bwd", "gemm_fp8_row_scale"]
)
def test_honest_kernels_pass_in_every_run(name: str) -> None:
    spec, source = spec_of(name), (KERNELS / f"{name}.py").read_text()
    for run in runs(spec, program_of(spec, source), 1):
        assert faults(spec, source, run) == {STORED: set(), "not rounded": set()}, run


GELU = """\
from primitives import gemm, kernel, per_column, tanh, where
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
    run = InputSettings(small_sizes(spec)[0], "normal", 3)
    assert faults(spec, GELU, run) == {STORED: set(), "not rounded": set()}
    assert faults(spec, GELU.replace(old, new), run) == {STORED: set(), "not rounded": {"act"}}


SWIGLU = """\
from primitives import column_index, gemm, kernel, pairs, per_row, silu, where
@kernel
def gemm_rmsnorm_swiglu(x, w, rstd):
    z = gemm(x, w.mT) * per_row(rstd)
    gate, up = pairs(z)
    return {"preact": z, "act": silu(gate) * up}
"""


@pytest.mark.parametrize("family", ["large", "huge", "tails"])
@pytest.mark.parametrize("seed", range(3))
def test_a_tail_is_seen_value_by_value(family: str, seed: int) -> None:
    spec = spec_of("gemm_rmsnorm_swiglu")
    run = InputSettings({"M": 200, "D": 88, "F": 112}, family, seed)
    assert faults(spec, SWIGLU, run) == {STORED: set(), "not rounded": set()}
    cut = SWIGLU.replace("silu(gate)", "where(gate < -7, gate * 0, silu(gate))")
    assert faults(spec, cut, run)["not rounded"] == {"act"}


@pytest.mark.parametrize("seed", range(3))
def test_the_thin_tail_of_gelu_is_seen_where_little_else_is_large(seed: int) -> None:
    spec, run = spec_of("gemm_bias_gelu"), InputSettings({"M": 200, "D": 88, "F": 112}, "tails", seed)
    assert faults(spec, GELU, run) == {STORED: set(), "not rounded": set()}
    cut = GELU.replace("    return", "    tail = z < -4.5\n    return").replace(
        "0.5 * z", "where(tail, 0, 0.5 * z)"
    )
    assert faults(spec, cut, run) == {STORED: set(), "not rounded": {"act"}}


MLP = """\
from primitives import gemm, kernel, pairs, silu, where
@kernel
def gemm_swiglu_mlp(x, w_gate_up, w_down):
    z = gemm(x, w_gate_up.mT)
    gate, up = pairs(z)
    act = silu(gate) * up
    return {"preact": z, "act": act, "out": gemm(act, w_down.mT)}
"""


@pytest.mark.parametrize("seed", range(3))
def test_what_a_matmul_reads_is_judged_unrounded_too(seed: int) -> None:
    """The second matmul reads act rounded to 16 bits, and rounding hides a wrong tail. So the gate must judge
    act before rounding, too."""
    spec, run = spec_of("gemm_swiglu_mlp"), InputSettings({"M": 200, "D": 88, "F": 112}, "tails", seed)
    assert faults(spec, MLP, run) == {STORED: set(), "not rounded": set()}
    cut = MLP.replace("silu(gate)", "where(gate < -7, gate * 0, silu(gate))")
    assert faults(spec, cut, run) == {STORED: set(), "not rounded": {"act"}}


RESIDUAL = """\
from primitives import gemm, kernel, minimum, per_column, row_sums, rsqrt
@kernel
def gemm_residual_partial_rmsnorm(y, w, x, gamma, eps):
    h = gemm(y, w.mT) + x
    return {"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(row_sums(h * h) / h.columns + eps)}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rsqrt(row_sums(h * h) / h.columns + eps)", "1 / (sqrt(row_sums(h * h) / h.columns) + eps)"),
        ("h.columns", "256"),
        ("row_sums(h * h)", "row_sums(where(column_index(h) < 111, h * h, 0))"),
    ],
)
def test_slips_of_a_norm_are_seen(old: str, new: str) -> None:
    spec = spec_of("gemm_residual_partial_rmsnorm")
    source = RESIDUAL.replace("minimum,", "column_index, sqrt, where,")
    run = InputSettings({"M": 200, "K": 88, "N": 112}, "zeros", 0)
    assert faults(spec, source, run) == {STORED: set(), "not rounded": set()}
    assert faults(spec, source.replace(old, new), run) == {STORED: {"rstd"}, "not rounded": {"rstd"}}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("most", [200, 1000])
def test_what_clamps_values_of_a_trained_models_residual_stream_is_seen(seed: int, most: int) -> None:
    spec, run = (
        spec_of("gemm_residual_partial_rmsnorm"),
        InputSettings({"M": 200, "K": 88, "N": 112}, "spikes", seed),
    )
    assert faults(spec, RESIDUAL, run) == {STORED: set(), "not rounded": set()}
    cut = RESIDUAL.replace("+ x", f"+ minimum(x, {most})")
    assert faults(spec, cut, run)[STORED] == {"h", "hg", "rstd"}


@pytest.mark.parametrize(
    ("sizes", "seed"),
    [({"M": 137, "D": 96, "F": 144}, 127516267279686), ({"M": 102, "D": 168, "F": 112}, 212527405363014)],
)
def test_where_one_value_outweighs_a_row_the_worst_element_may_be_far_off(
    sizes: dict[str, int], seed: int
) -> None:
    """In two of 9000 draws, the error of an honest kernel's worst element was 12 and 16 times the error of
    the yardstick's worst element. This test repeats the two draws, which must pass."""
    spec, source = spec_of("gemm_swiglu_bwd"), (KERNELS / "gemm_swiglu_bwd.py").read_text()
    assert faults(spec, source, InputSettings(sizes, "spikes", seed)) == {STORED: set(), "not rounded": set()}


@pytest.mark.parametrize(
    ("dim", "old", "new"),
    [
        ("F", "silu(gate) * up", "where(column_index(gate) < 400, silu(gate) * up, 0)"),
        ("F", "silu(gate)", "where(gate.columns * (gate * 0 + 1) > 400, gate * 0, silu(gate))"),
        ("M", "silu(gate)", "where(gate.rows * (gate * 0 + 1) > 2000, gate * 0, silu(gate))"),
    ],
)
def test_what_begins_at_some_extent_is_seen_at_a_long_one(dim: str, old: str, new: str) -> None:
    spec = spec_of("gemm_rmsnorm_swiglu")
    drawn = [run for run in runs(spec, program_of(spec, SWIGLU), 2) if run.long]
    assert all(faults(spec, SWIGLU, run) == {STORED: set(), "not rounded": set()} for run in drawn)
    for run in drawn:
        seen = run.sizes[dim] > (2000 if dim == "M" else 400)
        assert faults(spec, SWIGLU.replace(old, new), run)[STORED] == ({"act"} if seen else set()), run


def test_what_begins_where_two_extents_are_long_at_once_is_seen() -> None:
    """This kernel is wrong only if its rows and its columns are long. Runs that stretch one extent cannot
    show the error, because their other extents are short."""
    spec = spec_of("gemm_rmsnorm_swiglu")
    old = "silu(gate)"
    rows, columns = (f"gate.{extent} * (gate * 0 + 1) > 330" for extent in ("rows", "columns"))
    new = f"where({rows}, where({columns}, gate * 0, {old}), {old})"
    seen = 0
    for run in runs(spec, program_of(spec, SWIGLU), 2):
        both = run.sizes["M"] > 330 and run.sizes["F"] > 330
        assert faults(spec, SWIGLU.replace(old, new), run)[STORED] == ({"act"} if both else set()), run
        seen += both
    assert seen


def test_a_failure_can_be_had_again(tmp_path) -> None:
    spec = load(write_toy(tmp_path))
    with pytest.raises(Failed) as caught:
        _interpret(spec, program_of(spec, UNSCALED), {})
    words = caught.value.message
    assert words.startswith(
        "in the interpreter, inputs 'normal', sizes {'M': 264, 'K': 304, 'N': 344}, seed "
    )
    seed = int(words.partition("seed ")[2].partition(",")[0])
    again = InputSettings(small_sizes(spec)[0], "normal", seed)
    (_, errors), _ = Comparison.of(spec, again).errors(program_of(spec, UNSCALED))
    assert errors[0].reason in words
    assert faults(spec, TOY_KERNEL, again) == {STORED: set(), "not rounded": set()}


def scaled_to(family: str, scale: float) -> InputSettings:
    """A run of a family whose input ``x`` has this magnitude."""

    class Scaled(InputSettings):
        def draw(self, spec: Spec) -> dict[str, torch.Tensor]:
            drawn = draw(spec, self.sizes, self.seed)
            return drawn | {"x": (drawn["x"].double().sign() * scale).to(drawn["x"].dtype)}

    return Scaled({"M": 24, "D": 16, "F": 16}, family, 0)


@pytest.mark.parametrize("family", ["faint", "tiny"])
@pytest.mark.parametrize("scale", [2.0**-40, 0.0])
def test_a_truth_that_is_zero_by_cancellation_alone_is_not_judged(
    tmp_path: Path, family: str, scale: float
) -> None:
    """For z below 1e-8, fp64 gives zero for z - tanh(z), although the exact value is about z**3 / 3. If z
    itself is zero, the exact value is zero too."""
    spec = activation(tmp_path, "z - tanh(z)")
    compared = Comparison.of(spec, scaled_to(family, scale))
    assert not compared.truth["y"].any()
    assert compared.undefined.keys() == ({"y"} if scale else set())


def test_what_cancels_in_fp64_may_leave_what_fp32_does_and_no_more(tmp_path: Path) -> None:
    spec = activation(tmp_path, "z - tanh(z)")
    compared = Comparison.of(spec, scaled_to("faint", 2.0**-40))
    truth = compared.truth["y"]
    for value, excused in ((2.0**-64, True), (1.0, False), (math.inf, False), (math.nan, False)):
        got = {"y": torch.full_like(truth, value, dtype=torch.bfloat16)}
        yard = {"y": compared.values["y"].bfloat16()}
        errors = error_gate.compare(spec, got, compared.truth, yard)
        assert not all(error.passed for error in errors)
        assert (not error_gate.counted(errors, got, compared.undefined)) is excused, value


SMOOTHED = """\
name: smoothed
summary: Cross-entropy with label smoothing.
dims: {M: tokens, D: width, V: vocabulary}
inputs:
  x: {shape: [M, D], dtype: bf16, domain: finite}
  w: {shape: [V, D], dtype: bf16, init: {normal: {std: D**-0.5}}, domain: finite}
  target: {shape: [M], dtype: int64, init: {integers: [0, V]}, domain: [0, V - 1]}
constants: {a: 0.1}
outputs:
  loss: {shape: [M], dtype: fp32}
reference: |
  z = x @ w.mT
  lse = logsumexp(z, -1)
  loss = (1 - a) * (lse - z.gather(1, target[:, None])[:, 0]) + a * (lse - z.mean(-1))
cases:
  - {name: a, M: 4096, D: 1024, V: 32768}
"""
SMOOTHED_KERNEL = """\
from primitives import gemm, kernel, row_logsumexp, row_select, row_sums


@kernel
def smoothed(x, w, target, a):
    \"\"\"Cross-entropy with label smoothing.\"\"\"
    z = gemm(x, w.mT)
    return {"loss": row_logsumexp(z) - (1 - a) * row_select(z, target) - a * row_sums(z) / z.columns}
"""


def test_a_loss_over_a_single_word_is_zero_up_to_rounding(tmp_path: Path) -> None:
    path = tmp_path / "smoothed.yaml"
    path.write_text(SMOOTHED, encoding="utf-8")
    spec = load(path)
    for family in ("normal", "integers", "large"):
        run = InputSettings({"M": 40, "D": 24, "V": 1}, family, 3)
        assert not Comparison.of(spec, run).truth["loss"].any()
        assert faults(spec, SMOOTHED_KERNEL, run) == {STORED: set(), "not rounded": set()}
        more = SMOOTHED_KERNEL.replace("z.columns}", "z.columns + 1e-3}")
        assert faults(spec, more, run)[STORED] == {"loss"}
