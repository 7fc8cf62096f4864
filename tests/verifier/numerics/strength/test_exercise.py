"""Tests of the choices in a program: which nodes are choices, whether each side of a choice is needed, and
which choices are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from authoring import KERNELS, SPECS, activation, program_of
from spec_files import write_changed

from coda_agent import primitives
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.cpu_numerics import runs
from coda_agent.verifier.numerics.sizes import scaled
from coda_agent.verifier.numerics.strength.choices import Coverage, choices
from coda_agent.verifier.numerics.strength.exercise import smooth
from coda_agent.verifier.spec.file import SpecError
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import _interpret

pytestmark = pytest.mark.slow

IMPORTS = f"from primitives import {', '.join(primitives.__all__)}\n"


def spec_of(name: str) -> Spec:
    return load(SPECS / f"{name}.yaml", check=False)


def kernel(spec: Spec, body: str) -> Program:
    parameters = ", ".join([*spec.inputs, *spec.constants, *spec.static])
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return program_of(spec, f"{IMPORTS}\n\n@kernel\ndef made({parameters}):\n{lines}")


def normed(scale: str, before: str = "") -> Program:
    return kernel(
        spec_of("gemm_rmsnorm"), f'{before}\nt = gemm(x, w.mT)\nreturn {{"y": t * per_row({scale})}}'
    )


SWITCHED = 't = gemm(x, w.mT)\nreturn {{"y": t * per_row(rstd) * {}}}'


def relu2(square: str) -> Program:
    body = f'z = gemm(x, w.mT)\nact = {square}\nreturn {{"preact": z, "act": act * act}}'
    return kernel(spec_of("gemm_relu2"), body)


def interpreted(spec: Spec, program: Program) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    _interpret(spec, program, figures)
    return figures


def ops(program: Program) -> list[str]:
    return [program.nodes[node].op for node in choices(program)]


def test_a_comparison_that_only_chooses_is_that_choice() -> None:
    assert ops(relu2("where(z > 0, z, 0)")) == ["where"]
    assert ops(relu2("z * (z > 0)")) == ["greater"]
    assert ops(relu2("where((z > 0) * (z > 0), z, 0)")) == ["greater", "where"]
    assert ops(relu2("(z + abs(z)) / 2")) == ["abs"]
    assert ops(relu2("silu(z)")) == ["silu"]
    assert ops(relu2("exp(z)")) == ["exp"]
    assert ops(relu2("sin(z)")) == []


@pytest.mark.parametrize(
    "square",
    ["maximum(z, 0)", "where(z > 0, z, 0)", "z * (z >= 0)", "(z + abs(z)) / 2", "0 - minimum(0, 0 - z)"],
)
def test_each_side_of_an_honest_choice_is_needed(square: str) -> None:
    figures = interpreted(spec_of("gemm_relu2"), relu2(square))
    (choice,) = figures["choices"]
    assert [side["needed"] for side in choice["sides"]] == [True, True]
    assert all(0.3 < side["share"] < 0.7 for side in choice["sides"])


def test_two_forms_of_one_value_may_give_the_same() -> None:
    body = """\
z = gemm(x, w.mT)
gate, up = pairs(z)
falling, rising = exp(0 - abs(gate)), abs(gate)
sig = where(gate >= 0, 1 / (1 + falling), falling / (1 + falling))
return {"preact": z, "act": gate * sig * up + 0 * rising}"""
    figures = interpreted(spec_of("gemm_swiglu"), kernel(spec_of("gemm_swiglu"), body))
    assert {choice["op"] for choice in figures["choices"]} == {"abs", "exp", "where"}


TANHSHRINK = """
z = gemm(x, w.mT)
s = z * z
near = z * s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * (62 / 2835 - s * (1382 / 155925)))))
return {"y": where(s < 0.25, near, z - tanh(z))}"""
CLOGLOG = """
t = exp(gemm(x, w.mT))
near = t * (1 - t * (1 / 2 - t * (1 / 6 - t * (1 / 24 - t * (1 / 120 - t / 720)))))
return {"y": where(t < 0.25, near, 1 - exp(0 - t))}"""


@pytest.mark.parametrize(
    ("reference", "body"),
    [("z - tanh(z)", TANHSHRINK), ("tanhshrink(z)", TANHSHRINK), ("-torch.expm1(-exp(z))", CLOGLOG)],
)
def test_a_series_may_replace_a_form_that_cancels(tmp_path: Path, reference: str, body: str) -> None:
    """A kernel may compute small values by a series, if its other formula cancels there. No value needs the
    series: the error gate allows small values as large an error as larger values, so the other formula would
    pass alone."""
    spec = activation(tmp_path, reference)
    figures = interpreted(spec, kernel(spec, body))
    assert "where" in {choice["op"] for choice in figures["choices"]}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("1 / 6", "1 / 5", "numerics"),
        ("t < 0.25", "t < 0 - 1", "idle_choice"),
        ("where(t < 0.25, near, 1 - exp(0 - t))", "minimum(1 - exp(0 - t), 1)", "idle_choice"),
    ],
)
def test_what_replaces_it_is_judged(tmp_path: Path, old: str, new: str, code: str) -> None:
    spec = activation(tmp_path, "-torch.expm1(-exp(z))")
    with pytest.raises(Failed) as failed:
        interpreted(spec, kernel(spec, CLOGLOG.replace(old, new)))
    assert failed.value.code == code


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("maximum(rstd, -1)", "its second argument is never the larger"),
        ("abs(rstd)", "its argument is never negative"),
        ("rstd * (rstd > 0)", "it always holds"),
        ("rstd + (rstd < 0)", "it never holds"),
        ("where(rstd > 0, rstd, 1)", "its condition always holds"),
        ("rstd * (1 + (rstd > 1.0e9) * (rstd < 1.0001e9))", "it never holds"),
    ],
)
def test_what_nothing_needs_is_refused(scale: str, words: str) -> None:
    with pytest.raises(Failed) as failed:
        interpreted(spec_of("gemm_rmsnorm"), normed(scale))
    assert failed.value.code == "idle_choice" and words in failed.value.message


def test_a_refusal_has_the_line_of_the_choice() -> None:
    program, figures = normed("abs(rstd)"), dict[str, Any]()
    lines = [None if node.op == "input" else 7 for node in program.nodes]
    with pytest.raises(Failed) as failed:
        _interpret(spec_of("gemm_rmsnorm"), program, figures, lines)
    assert failed.value.line == 7


@pytest.mark.parametrize("scale", ["minimum(rstd, 1.5)", "minimum(rstd, 1e9)", "maximum(rstd, 0.25)"])
def test_a_clamp_beyond_what_is_typical_is_wrong_somewhere(scale: str) -> None:
    with pytest.raises(Failed) as failed:
        interpreted(spec_of("gemm_rmsnorm"), normed(scale))
    assert failed.value.code == "numerics"


@pytest.mark.parametrize(
    "choice",
    [
        "maximum(x.columns, 9)",
        "minimum(1, x.rows)",
        "abs(1 - x.rows)",
        "where(x.rows > 3, 3, 5)",
        "(x.columns * 4 == 11 * x.rows)",
    ],
)
def test_a_choice_by_sizes_and_literals_alone_is_refused_with_its_line(choice: str) -> None:
    with pytest.raises(ProgramError) as refused:
        normed(f"rstd * {choice}")
    assert (refused.value.code, refused.value.line) == ("size_choice", 8)


@pytest.mark.parametrize(
    "factor",
    [
        "1 - 1e-12 / ((x.columns - 2048) ** 2 + 1e-12)",
        "1 - sigmoid(x.columns - 2047)",
        "(x.columns + 0 * rstd != 2048)",
        "1 - 0.03 / ((x.rows - 1595) ** 2 + 0.03)",  # no case has 1595 rows
    ],
)
def test_outputs_do_not_jump_with_a_size(factor: str) -> None:
    with pytest.raises(Failed) as failed:
        smooth(spec_of("gemm_rmsnorm"), normed(f"rstd * ({factor})"), 0)
    assert failed.value.code == "size_choice"


@pytest.mark.parametrize("name", ["gemm_residual_partial_layernorm", "gemm_qk_norm_rope"])
def test_means_do_not_jump(name: str) -> None:
    spec = spec_of(name)
    smooth(spec, program_of(spec, (KERNELS / f"{name}.py").read_text()), 0)


def test_scaled_sizes_keep_the_ratios_of_the_cases() -> None:
    spec = spec_of("gemm_swiglu_mlp")
    found = list(scaled(spec, 1))
    assert {(s["D"], s["F"]) for s in found} >= {(64, 176)} or any(4 * s["F"] == 11 * s["D"] for s in found)
    ratios = {s["F"] / s["D"] for s in found}
    assert ratios == {case.sizes["F"] / case.sizes["D"] for case in spec.cases}


def test_all_families_meet_the_ratios_where_a_program_computes_with_sizes() -> None:
    spec = spec_of("gemm_rmsnorm")
    ratios = {tuple(s[d] for d in ("K", "N")) for s in scaled(spec, 1)}

    def families(scale: str) -> set[str]:
        drawn = runs(spec, normed(scale), 1)
        return {run.family for run in drawn if (run.sizes["K"], run.sizes["N"]) in ratios}

    assert families("rstd / x.columns") >= {"normal", "ends", "spikes", "integers"}
    assert families("rstd") == {"normal"}


def test_a_reference_that_raises_at_larger_sizes_only_is_the_specs_mistake(tmp_path: Path) -> None:
    line = "  y = (x @ w.mT) * rstd[:, None]"
    late = "  y = (x @ w.mT) * (rstd[:, None] if K < 64 else rstd.view(1, -1))"
    text = (SPECS / "gemm_rmsnorm.yaml").read_text()
    spec = load(write_changed(tmp_path / "gemm_rmsnorm.yaml", text, line, late))
    with pytest.raises(SpecError, match="its reference raises RuntimeError on inputs 'normal'"):
        interpreted(spec, normed("rstd"))


def test_a_sigmoid_that_never_bends_is_refused_and_one_that_does_is_needed() -> None:
    gate = "per_row(sigmoid(1e4 * (rstd + 1e4)))"  # equals 1 for every positive rstd
    with pytest.raises(Failed) as failed:
        interpreted(spec_of("gemm_rmsnorm"), kernel(spec_of("gemm_rmsnorm"), SWITCHED.format(gate)))
    assert failed.value.code == "idle_choice"
    spec = spec_of("gemm_swiglu")
    figures = interpreted(spec, program_of(spec, (KERNELS / "gemm_swiglu.py").read_text()))
    (bend,) = figures["choices"]
    assert bend["op"] == "silu" and [side["needed"] for side in bend["sides"]] == [True, True]


@pytest.mark.parametrize("limit", ["3e5", "2e9", "1e25", "1e37"])
@pytest.mark.parametrize("clamp", ["tanh(rstd / {0}) * {0}", "(sigmoid(rstd / {0}) - 0.5) * (4 * {0})"])
def test_a_bend_far_beyond_what_is_typical_is_refused(limit: str, clamp: str) -> None:
    with pytest.raises(Failed) as failed:
        interpreted(spec_of("gemm_rmsnorm"), normed(clamp.format(limit)))
    assert failed.value.code in ("numerics", "idle_choice")


def test_a_program_without_choices_has_nothing_open() -> None:
    assert Coverage(normed("rstd")).open == []
