"""Tests of the inputs that are drawn for each form of ``init``, each family and each dtype, and of the
results that the reference computes from such inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.error_gate import compare
from coda_agent.verifier.numerics.inputs import EVERY, FAMILIES, ON_CPU, draw
from coda_agent.verifier.numerics.search import search
from coda_agent.verifier.numerics.strength.mutation_score import weak_spots
from coda_agent.verifier.spec.model import Spec

SPEC: dict[str, Any] = {
    "name": "wide",
    "summary": "A scaled matmul of fp8, an angle a row and column, and one column's value a row.",
    "dims": {"M": "rows", "K": "inner", "N": "columns"},
    "inputs": {
        "a": {"shape": ("M", "K"), "dtype": "fp8_e4m3", "init": {"normal": {"std": 200.0}}},
        "b": {"shape": ("N", "K"), "dtype": "fp8_e4m3"},
        "scale": {"shape": (), "dtype": "fp32", "init": {"uniform": (0.5, 1.5)}},
        "target": {"shape": ("M",), "dtype": "int64", "init": {"integers": (0, "N"), "ignored": -100}},
        "position": {"shape": ("M",), "dtype": "int32", "init": {"count": 70}},
        "series": {"shape": ("N",), "dtype": "fp32", "init": {"geometric": (1.0, 1e-4)}},
    },
    "outputs": {
        "c": {"shape": ("M", "N"), "dtype": "bf16"},
        "t": {"shape": ("M",), "dtype": "fp32"},
    },
    "reference": (
        "product = (a @ b.mT) * scale\n"
        "c = product + 100 * cos(position[:, None] * series)\n"
        "t = where(target >= 0, product.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)\n"
    ),
    "baseline": (
        "kind = torch.bfloat16\n"
        "product = torch._scaled_mm(a, b.mT, scale_a=scale, scale_b=scale / scale, out_dtype=kind)\n"
        "c = product + 100 * cos(position[:, None] * series)\n"
        "t = where(target >= 0, product.gather(1, target.clamp(min=0)[:, None])[:, 0], 0)\n"
    ),
    "cases": ({"name": "one", "M": 300, "K": 144, "N": 208},),
}
SIZES = {"M": 300, "K": 144, "N": 208}
MANY = {"M": 20000, "K": 16, "N": 50}


def wide(**changes: Any) -> Spec:
    return Spec.model_validate({**SPEC, **changes})


def one(dtype: str, init: dict[str, Any], shape: tuple[str, ...] = ("M",)) -> Spec:
    """Return the spec with one more input, ``other``."""
    other = {"shape": shape, "dtype": dtype, "init": init}
    return wide(inputs={**SPEC["inputs"], "other": other})


DOMAINS: list[tuple[str, dict[str, Any], Any]] = [
    ("fp16", {"uniform": (0.25, 0.5)}, "positive"),
    ("fp32", {"uniform": (0.25, 0.5)}, (0.25, 0.5)),
    ("bf16", {"normal": {"std": 0.2}}, (-0.999, 0.999)),
]


@pytest.mark.parametrize("family", [*EVERY, *ON_CPU])
@pytest.mark.parametrize(("dtype", "init", "domain"), DOMAINS)
def test_no_value_lies_outside_of_its_domain(
    dtype: str, init: dict[str, Any], domain: Any, family: str
) -> None:
    other = {"shape": ("M", "K"), "dtype": dtype, "init": init, "domain": domain}
    spec = wide(inputs={**SPEC["inputs"], "other": other})
    found, (low, high) = (
        draw(spec, SIZES, 3, family=family)["other"].double(),
        spec.inputs["other"].bounds(SIZES),
    )
    assert found.min() >= low and found.max() <= high


@pytest.mark.parametrize(("dtype", "init", "domain"), DOMAINS)
def test_no_searched_value_lies_outside_of_its_domain(dtype: str, init: dict[str, Any], domain: Any) -> None:
    other = {"shape": ("M", "K"), "dtype": dtype, "init": init, "domain": domain}
    spec = wide(inputs={**SPEC["inputs"], "other": other})
    low, high = spec.inputs["other"].bounds(SIZES)
    for seed in range(30):
        found = search(spec, SIZES, seed, dict.fromkeys(spec.drawn, (0.3, 1.0)))["other"].double()
        assert found.min() >= low and found.max() <= high


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_are_uniform_and_one_in_ten_is_ignored(family: str) -> None:
    target = draw(wide(), MANY, 3, family=family)["target"]
    assert target.dtype == torch.int64 and target.shape == (20000,)
    kept = target[target != -100]
    assert 1 - len(kept) / 20000 == pytest.approx(0.1, abs=0.01)
    counts = torch.bincount(kept, minlength=50)
    assert len(counts) == 50 and counts.min() > 360 * 0.75 and counts.max() < 360 * 1.25
    assert not torch.equal(target, draw(wide(), MANY, 4, family=family)["target"])


def test_integers_reach_both_ends_of_their_range() -> None:
    spec = one("int32", {"integers": (-2, "2 * K - 29")})  # for K = 16: the integers from -2 to 2
    other = draw(spec, MANY, 0)["other"]
    assert other.dtype == torch.int32 and sorted(set(other.tolist())) == [-2, -1, 0, 1, 2]
    assert sorted(set(draw(spec, MANY, 0)["target"].tolist())) == [-100, *range(50)]


def test_both_ends_are_among_few_integers_of_a_wide_range() -> None:
    few = {"M": 40, "K": 16, "N": 100_000}
    for seed in range(20):
        target = draw(wide(), few, seed)["target"]
        assert {0, 99_999} <= set(target.tolist()) and len(target.unique()) > 30
    assert draw(wide(), few | {"M": 1}, 0)["target"].shape == (1,)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_series_is_what_its_formula_says(family: str) -> None:
    drawn = draw(one("bf16", {"count": "K"}, ("M", "K")), {"M": 300, "K": 24, "N": 64}, 0, family=family)
    assert drawn["position"].tolist() == [i % 70 for i in range(300)]
    assert drawn["position"].dtype == torch.int32
    assert drawn["other"].tolist() == [[i % 24] * 24 for i in range(300)]
    frequencies = [10000 ** -(j / 64) for j in range(64)]  # as in rotary embeddings
    torch.testing.assert_close(drawn["series"], torch.tensor(frequencies), rtol=1e-7, atol=0)


def test_a_series_of_one_value_and_of_a_matrix() -> None:
    scalar = draw(one("fp32", {"geometric": (3.0, 1.0)}, ()), SIZES, 0)["other"]
    assert scalar.shape == () and scalar.item() == 3.0
    assert draw(one("fp32", {"count": 5}, ()), SIZES, 0)["other"].item() == 0.0
    rows = draw(one("fp32", {"geometric": (8.0, 0.5)}, ("M", "K")), {"M": 3, "K": 4, "N": 5}, 0)["other"]
    torch.testing.assert_close(rows, torch.tensor([8.0, 4.0, 2.0, 1.0]).repeat(3, 1))
    assert rows.is_contiguous()


def test_fp8_is_clamped_and_keeps_its_scale_where_it_would_vanish() -> None:
    drawn = {family: draw(wide(), MANY, 0, family=family) for family in FAMILIES}
    a = {family: inputs["a"].float() for family, inputs in drawn.items()}
    assert drawn["normal"]["a"].dtype == torch.float8_e4m3fn
    assert a["normal"].isfinite().all() and a["normal"].abs().max() == 448
    share = (a["normal"].abs() == 448).float().mean().item()  # values of 432 (2.16 sigma) and more become 448
    assert share == pytest.approx(0.031, abs=0.003)
    assert torch.equal(a["tiny"], a["normal"])
    assert torch.equal(a["positive"], a["normal"].abs())
    assert all(values.isfinite().all() for values in a.values())
    assert set(a["integers"].unique().tolist()) == {-448.0, -256.0, 0.0, 256.0, 448.0}


def test_a_scalar_is_drawn_and_scaled_like_any_other() -> None:
    spec = one("fp32", {"normal": {"std": 1.0}}, ())
    drawn = {family: draw(spec, SIZES, 5, family=family)["other"] for family in FAMILIES}
    assert drawn["normal"].shape == () and drawn["normal"] != 0
    assert drawn["positive"] == drawn["normal"].abs() and drawn["tiny"] * 1024 == drawn["normal"]


LAYER: dict[str, Any] = {
    "name": "layer",
    "summary": "A projection on the residual stream, with every kind of input that families tell apart.",
    "dims": {"M": "rows", "K": "inner", "N": "columns"},
    "inputs": {
        "y": {"shape": ("M", "K"), "dtype": "bf16"},
        "w": {"shape": ("N", "K"), "dtype": "bf16", "init": {"normal": {"std": "K**-0.5"}}},
        "x": {"shape": ("M", "N"), "dtype": "bf16"},
        "bias": {"shape": ("N",), "dtype": "fp32"},
        "scale": {"shape": ("M",), "dtype": "fp32", "init": {"uniform": (0.02, 0.04)}},
    },
    "outputs": {"h": {"shape": ("M", "N"), "dtype": "bf16"}},
    "reference": "h = (y @ w.mT) * scale[:, None] + x + bias",
    "cases": ({"name": "one", "M": 512, "K": 256, "N": 320},),
}
WIDE = {"M": 512, "K": 256, "N": 320}


@pytest.fixture(scope="module")
def families() -> dict[str, dict[str, torch.Tensor]]:
    spec = Spec.model_validate(LAYER)
    return {f: {k: t.double() for k, t in draw(spec, WIDE, 6, family=f).items()} for f in FAMILIES | ON_CPU}


def test_small_and_large_scale_activations_alone(families: dict[str, dict[str, torch.Tensor]]) -> None:
    for family, factor in (("small", 0.01), ("large", 8.0)):
        for name in ("y", "x"):
            torch.testing.assert_close(
                families[family][name], factor * families["normal"][name], rtol=2**-7, atol=0
            )
        for name in ("w", "bias", "scale"):
            assert torch.equal(families[family][name], families["normal"][name])


def test_outliers_are_the_same_rows_of_all_activations(families: dict[str, dict[str, torch.Tensor]]) -> None:
    normal, drawn = families["normal"], families["outliers"]
    rows = {name: drawn[name].abs().amax(1) / normal[name].abs().amax(1) for name in ("y", "x")}
    assert torch.equal(rows["y"] > 0.5, rows["x"] > 0.5)
    assert 0.05 < (rows["y"] > 0.5).double().mean() < 0.2
    usual = rows["y"][rows["y"] < 0.5]
    assert usual.min() > 1 / 101 and usual.max() < 1 / 29
    columns = drawn["w"].abs().amax(0) / normal["w"].abs().amax(0)
    assert 0.05 < (columns > 0.5).double().mean() < 0.2 and columns.min() > 1 / 101
    assert all((drawn[name].abs() <= normal[name].abs()).all() for name in drawn)  # so no value can overflow


def test_tails_are_the_same_few_rows_of_all_activations(families: dict[str, dict[str, torch.Tensor]]) -> None:
    normal, drawn = families["normal"], families["tails"]
    factor = {name: drawn[name].norm(dim=1) / normal[name].norm(dim=1) for name in ("y", "x")}
    many = factor["y"] > 1
    assert 1 / 16 < many.double().mean() < 1 / 4 and torch.equal(many, factor["x"] > 1)
    for of in factor.values():
        torch.testing.assert_close(of, torch.where(many, 3.0, 0.25).double(), rtol=1e-3, atol=0)
    assert all(torch.equal(drawn[name], normal[name]) for name in ("w", "bias", "scale"))


def test_spikes_are_one_value_each_in_the_same_few_rows_of_all_activations(
    families: dict[str, dict[str, torch.Tensor]],
) -> None:
    normal, drawn = families["normal"], families["spikes"]
    found = {name: drawn[name] != normal[name] for name in ("y", "x")}
    many = found["y"].any(1)
    assert 1 / 16 < many.double().mean() < 1 / 4 and torch.equal(many, found["x"].any(1))
    for name, at in found.items():
        assert at.sum(1).max() == 1
        sizes = drawn[name][at].abs() / normal[name].double().square().mean().sqrt()
        assert sizes.min() > 30 and 1000 < sizes.max() < 4200
        assert 1 / 4 < (drawn[name][at] > 0).double().mean() < 3 / 4
    assert all(torch.equal(drawn[name], normal[name]) for name in ("w", "bias", "scale"))


def test_negative_makes_every_product_negative(families: dict[str, dict[str, torch.Tensor]]) -> None:
    normal, drawn = families["normal"], families["negative"]
    for name in ("y", "x"):
        torch.testing.assert_close(drawn[name], -40 * normal[name].abs(), rtol=2**-7, atol=0)
    assert torch.equal(drawn["w"], normal["w"].abs()) and (drawn["y"] @ drawn["w"].mT).max() < -104
    assert torch.equal(drawn["scale"], normal["scale"])


def test_zeros_leave_rows_to_eps(families: dict[str, dict[str, torch.Tensor]]) -> None:
    size = {name: families["zeros"][name].square().mean(1).sqrt() for name in ("y", "x")}
    assert torch.equal(size["y"] == 0, size["x"] == 0)
    assert 0.06 < (size["x"] == 0).double().mean() < 0.2
    near = (size["x"] > 2**-12.5) & (size["x"] < 2**-7.5)
    assert 0.15 < near.double().mean() < 0.35 and 0.5 < (size["x"] > 0.8).double().mean() < 0.75
    assert torch.equal(families["zeros"]["w"], families["normal"]["w"])


def test_low_rank_is_of_rank_eight_at_most_and_of_the_same_size(
    families: dict[str, dict[str, torch.Tensor]],
) -> None:
    for name in ("y", "w", "x"):
        matrix = families["low_rank"][name]
        values = torch.linalg.svdvals(matrix)
        assert values[8] < 0.02 * values[0]  # not zero, because values are rounded to bf16
        assert matrix.std().item() == pytest.approx(families["normal"][name].std().item(), rel=0.25)
        assert matrix.abs().max() < 7 * matrix.std()


def test_integers_are_few_multiples_of_a_power_of_two(families: dict[str, dict[str, torch.Tensor]]) -> None:
    drawn = families["integers"]
    for name, unit in {"y": 2**-2, "x": 2**-2, "bias": 2**-2, "w": 2**-6}.items():
        steps = drawn[name] / unit
        assert torch.equal(steps, steps.round()) and steps.abs().max() == 8 and len(steps.unique()) == 17
    steps = drawn["scale"] * 2**9
    assert torch.equal(steps, steps.round()) and set(steps.int().tolist()) == set(
        range(11, 21)
    )  # the steps within the range of its init


def test_one_may_divide_by_an_integers_scale() -> None:
    spec = Spec.model_validate(SPEC)
    seen = {float(draw(spec, SIZES, seed, family="integers")["scale"]) for seed in range(20)}
    assert seen == {0.5, 1.0}  # the range is [0.5, 1.5), but the reciprocal of 0.75 is not exact


def test_one_row_can_be_drawn_in_every_family() -> None:
    for family in FAMILIES:
        drawn = draw(Spec.model_validate(LAYER), {"M": 1, "K": 8, "N": 16}, 0, family=family)
        assert all(t.isfinite().all() for t in drawn.values()) and drawn["y"].shape == (1, 8)


def test_truth_is_that_of_plain_loops() -> None:
    sizes = {"M": 7, "K": 5, "N": 6}
    inputs = draw(wide(), sizes, 2)
    inputs["target"][:2] = torch.tensor([-100, 5])
    before = {name: t.clone() for name, t in inputs.items()}
    truth = reference.oracle(wide(), inputs, sizes)
    a, b = inputs["a"].double().tolist(), inputs["b"].double().tolist()
    for i in range(7):
        row = [inputs["scale"].item() * sum(x * y for x, y in zip(a[i], b[j], strict=True)) for j in range(6)]
        target = int(inputs["target"][i])
        assert truth["t"][i].item() == pytest.approx(row[target] if target >= 0 else 0.0, rel=1e-12)
        for j in range(6):
            angle = torch.tensor(i * inputs["series"][j].item(), dtype=torch.float64)
            assert truth["c"][i, j].item() == pytest.approx(row[j] + 100 * angle.cos().item(), rel=1e-12)
    assert all(torch.equal(t.float(), before[name].float()) for name, t in inputs.items())


def test_indices_stay_integers_where_fp32_would_round_them() -> None:
    spec = one("int64", {"integers": (2**40, 2**40 + 1000)})
    text = "c = (a @ b.mT) * 0\nt = (other - 2 ** 40) * scale"
    spec = spec.model_copy(update={"reference": text})
    inputs = draw(spec, SIZES, 0)
    expected = (inputs["other"] - 2**40).float() * inputs["scale"]
    assert len(expected.unique()) > 200  # in fp32, with its 24 bits, all values would be equal
    torch.testing.assert_close(reference.yardstick(spec, inputs, SIZES)["t"], expected, rtol=1e-6, atol=0)


def test_fp8_operands_are_exact_and_what_is_made_of_them_is_rounded_to_bf16() -> None:
    text = "c = a @ b.mT\nt = ((a * 1.01) @ b.mT)[:, 0]"
    spec = wide(reference=text)
    inputs = draw(spec, SIZES, 0)
    a, b = inputs["a"].double(), inputs["b"].double()
    got = reference.fp32(spec, inputs, SIZES)
    torch.testing.assert_close(got["c"].double(), a @ b.mT, rtol=1e-5, atol=1e-3)
    rounded = (inputs["a"].float() * 1.01).bfloat16().double() @ b[0]
    torch.testing.assert_close(got["t"].double(), rounded, rtol=1e-5, atol=1e-3)
    assert (got["t"].double() - 1.01 * (a @ b[0])).abs().max() > 0.5  # so the operands were not in fp32


def test_no_mutant_survives_and_the_yardstick_passes() -> None:
    spec = wide()
    assert weak_spots(spec, SIZES) == []
    for family in FAMILIES:
        inputs = draw(spec, SIZES, 1, family=family)
        truth, yard = (f(spec, inputs, SIZES) for f in (reference.oracle, reference.yardstick))
        assert all(error.passed for error in compare(spec, yard, truth, yard))


def test_an_update_is_judged_out_of_place() -> None:
    inputs = {**SPEC["inputs"], "old": {"shape": ("M", "N"), "dtype": "bf16"}}
    outputs = {"c": {"shape": ("M", "N"), "dtype": "bf16", "updates": "old"}}
    spec = wide(inputs=inputs, outputs=outputs, reference="c = old + (a @ b.mT) * scale / 256")
    drawn = draw(spec, SIZES, 0)
    old = drawn["old"].clone()
    truth, yard = reference.oracle(spec, drawn, SIZES), reference.yardstick(spec, drawn, SIZES)
    assert torch.equal(drawn["old"], old)
    product = drawn["a"].double() @ drawn["b"].double().mT * drawn["scale"].double() / 256
    torch.testing.assert_close(truth["c"], old.double() + product, rtol=1e-12, atol=1e-12)
    (kept,) = compare(spec, {"c": (old.double() + product).bfloat16()}, truth, yard)
    (twice,) = compare(spec, {"c": (old.double() + 2 * product).bfloat16()}, truth, yard)
    assert kept.passed and not twice.passed
