"""Tests of the values at which subexpressions are zero, and of inputs that depend on each other."""

from __future__ import annotations

from random import Random

import pytest
import torch
from authoring import SPECS, program_of

from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.dependent import depend, dependent
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.landmarks import near_values, places, roots
from coda_agent.verifier.numerics.reference import finished, oracle
from coda_agent.verifier.spec.model import Spec

SIZES = {"M": 16, "K": 24, "N": 8}


def spec_of(name: str) -> Spec:
    return load(SPECS / f"{name}.yaml", check=False)


def scaled(factor: str) -> tuple[Spec, Program]:
    source = f"""\
from primitives import cos, exp, gemm, kernel, log, maximum, sigmoid


@kernel
def scaled(y, w, x, alpha):
    \"\"\"Scale by a function of alpha.\"\"\"
    return {{"h": x + alpha * ({factor}) * gemm(y, w.mT)}}
"""
    spec = spec_of("gemm_alpha_residual")
    return spec, program_of(spec, source)


def roots_of(factor: str) -> list[float]:
    spec, program = scaled(factor)
    return roots(spec, program, "alpha", SIZES, draw(spec, SIZES, 1), Random(1))


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        ("alpha - 0.7071", [0.7071]),
        ("1 / (3 * alpha + 12345)", [-4115.0]),
        ("exp(-(alpha - 0.25) * (alpha - 0.25))", [0.25]),
        ("alpha * alpha - 2.8 * alpha + 1.96", [1.4]),
        ("log(alpha) + 1", [0.36787944]),
        ("(alpha - 1e-9) * (alpha + 1e9)", [1e-9, -1e9]),
        ("sigmoid(alpha * 1e7 - 5e6) - 0.25", [0.5 - 1.0986e-7]),
        ("maximum(alpha - 2, 3 - alpha)", [2.0, 3.0, 2.5]),
    ],
)
def test_the_zeros_and_poles_of_a_factor_are_found(factor: str, expected: list[float]) -> None:
    found = torch.tensor(roots_of(factor))
    for number in expected:
        assert float((found - number).abs().min()) <= 2e-7 * abs(number), (number, found)


def test_a_function_with_many_zeros_gives_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 4 < len(roots_of("cos(1e6 * alpha)")) < 40


def test_a_scalar_takes_ends_round_numbers_and_zeros_one_at_a_time() -> None:
    spec, program = scaled("1 + 0 * (alpha - 0.7071)")
    tried = [at.near["alpha"] for at in places(spec, program, 1) if at.near.keys() == {"alpha"}]
    assert all(len(numbers) == 1 for numbers in tried)
    numbers = torch.tensor([number for (number,) in tried])
    for number in (0.5, 1.5, 1.0, -1.0, 2.0, 10.0, 0.1, 0.0, 0.7071):
        assert float((numbers - number).abs().min()) < 1e-7, number


def test_an_index_beyond_a_small_table_is_tried_in_a_long_one() -> None:
    spec = spec_of("gemm_gathered_swiglu")
    source = """\
from primitives import gemm, kernel, pairs, per_row, silu


@kernel
def gathered(x, w, offsets, index):
    \"\"\"Another product for one token.\"\"\"
    z = gemm(x, w.mT, offsets, index) * per_row(1 + 0 * (index - 7777))
    gate, up = pairs(z)
    return {"preact": z, "act": silu(gate) * up}
"""
    for sizes, near in places(spec, program_of(spec, source), 1):
        if near == {"index": (7777.0,)}:
            assert sizes["T"] > 7777
            assert set(near_values(spec, sizes, 0, near)["index"].tolist()) == {7777}
            return
    pytest.fail("no run has token 7777")


def test_a_vector_takes_every_value_that_is_legal() -> None:
    spec = spec_of("gemm_rmsnorm")
    near = {"rstd": (1.0, 3.0, -5.0)}
    values = near_values(spec, {"M": 9, "K": 8, "N": 8}, 4, near)["rstd"]
    assert sorted(set(values.tolist())) == [1.0, 3.0]


def test_targets_come_near_predictions() -> None:
    spec = spec_of("gemm_residual_partial_rmsnorm")
    sizes = {"M": 20, "K": 16, "N": 24}
    inputs = dependent(spec, sizes, 3)
    product = inputs["y"].double() @ inputs["w"].double().mT
    distance = (inputs["x"].double() - product).norm() / product.norm()
    assert 0.005 < float(distance) < 0.05
    assert depend(spec, sizes) and not depend(spec_of("gemm_rmsnorm_swiglu"), {"M": 20, "D": 16, "F": 24})


def test_a_target_becomes_the_likeliest_word() -> None:
    spec = spec_of("gemm_partial_cross_entropy")
    sizes = {"M": 200, "D": 16, "V": 24}
    inputs = dependent(spec, sizes, 3)
    logits = oracle(spec, finished(spec, inputs, sizes), sizes)["logits"]
    kept = inputs["target"] >= 0
    assert 0 < int((~kept).sum()) < 60  # a tenth is ignored, as in every family
    assert torch.equal(logits.argmax(-1)[kept], inputs["target"][kept])


def test_rows_repeat() -> None:
    spec, sizes = spec_of("gemm_partial_cross_entropy"), {"M": 200, "D": 16, "V": 24}
    inputs = draw(spec, sizes, 3, family="repeated")
    rows = torch.cat((inputs["x"].double(), inputs["target"].double()[:, None]), 1)
    assert 1 < len(rows.unique(dim=0)) <= 3
    assert len(inputs["w"].double().unique(dim=0)) == 24
