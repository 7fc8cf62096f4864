"""Tests of the error gate against independent truths: honest kernels pass at every size, and every cheat
fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checkout import ROOT
from torch import Tensor
from torch.nn.functional import silu

from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate, error_sums, exactness, limits, reference
from coda_agent.verifier.numerics.error_gate import compare
from coda_agent.verifier.numerics.inputs import FAMILIES, draw
from coda_agent.verifier.numerics.strength.mutation_score import weak_spots
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Tolerance

NORM, SWIGLU, BACKWARD = "gemm_residual_partial_rmsnorm", "gemm_rmsnorm_swiglu", "gemm_swiglu_bwd"
SPECS = {name: load(ROOT / "specs" / f"{name}.yaml") for name in (NORM, SWIGLU, BACKWARD)}
Outputs = dict[str, Tensor]
Gemm = Callable[[Tensor, Tensor], Tensor]


def at(spec: Spec, m: int, k: int, n: int) -> dict[str, int]:
    """Return sizes by dim. All three specs declare three dims in this order: the rows, the inner dim or model
    width, and the columns."""
    return dict(zip(spec.dims, (m, k, n), strict=True))


def tensor_core(a: Tensor, b: Tensor) -> Tensor:
    """Multiply with fp32 accumulation: add the products of 16 elements of K at a time, in order."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(0, a.shape[1], 16):
        total += a[:, k : k + 16].float() @ b[k : k + 16].float()
    return total


def bf16_partials(a: Tensor, b: Tensor) -> Tensor:
    """A cheat: the partial sums over K are kept in bf16."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for k in range(0, a.shape[1], 64):
        total += (a[:, k : k + 64].float() @ b[k : k + 64].float()).bfloat16()
    return total.float()


def without_first(a: Tensor, b: Tensor) -> Tensor:
    """A cheat: the first element of K is dropped."""
    return tensor_core(a[:, 1:], b[1:])


def fp8_operands(a: Tensor, b: Tensor) -> Tensor:
    return tensor_core(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn))


def sums(t: Tensor) -> Tensor:
    """Sum each row as a generated kernel would: add up each tile of 128 columns one value at a time, then add
    the tiles' sums one by one."""
    total = torch.zeros(t.shape[0])
    for tile in t.split(128, 1):
        partial = torch.zeros(t.shape[0])
        for column in tile.unbind(1):
            partial += column
        total += partial
    return total


def kernel(name: str, i: Outputs, gemm: Gemm = tensor_core) -> Outputs:
    """Compute a spec's outputs as an honest kernel would: in fp32, with each output rounded once. No code of
    the references is used."""
    f = {key: value.float() for key, value in i.items()}
    if name == NORM:
        h = f["x"] + gemm(i["y"], i["w"].mT)
        rstd = 1 / torch.sqrt(sums(h * h) * (1 / h.shape[1]) + 1e-6)
        return {"h": h.bfloat16(), "hg": (f["gamma"] * h).bfloat16(), "rstd": rstd}
    if name == SWIGLU:
        z = f["rstd"][:, None] * gemm(i["x"], i["w"].mT)
        gate, up = z.unflatten(1, (-1, 2)).unbind(-1)
        return {"preact": z.bfloat16(), "act": (gate * up / (1 + torch.exp(-gate))).bfloat16()}
    d = gemm(i["dy"], i["w_down"])
    gate, up = f["z"].unflatten(1, (-1, 2)).unbind(-1)
    sig = 0.5 + 0.5 * torch.tanh(0.5 * gate)
    act = gate * sig
    dgate, dup = d * up * (sig + act * (1 - sig)), d * act
    dz = torch.stack((dgate, dup), 2).reshape(f["z"].shape)
    return {"dz": dz.bfloat16(), "act": (act * up).bfloat16(), "s": sums(dgate * gate + dup * up)}


class Bench:
    """A spec at given sizes with its inputs, truth and yardstick."""

    def __init__(self, name: str, sizes: dict[str, int], seed: int = 0, family: str = "normal"):
        self.spec, self.sizes = SPECS[name], sizes
        self.inputs = draw(self.spec, sizes, seed, family=family)
        self.truth = reference.oracle(self.spec, self.inputs, sizes)
        self.yard = reference.yardstick(self.spec, self.inputs, sizes)

    def faults(self, got: Outputs) -> dict[str, str]:
        """Return the reason of each failure, by the name of the output that fails."""
        return {e.name: e.reason for e in compare(self.spec, got, self.truth, self.yard) if not e.passed}


@pytest.fixture(scope="module")
def benches():
    return {name: Bench(name, at(spec, 300, 512, 264)) for name, spec in SPECS.items()}


# --- truth ------------------------------------------------------------------------------------------


def test_norm_is_what_the_layers_compute():
    b = Bench(NORM, at(SPECS[NORM], 40, 24, 56))
    i = {k: v.double() for k, v in b.inputs.items()}
    h = i["x"] + torch.nn.functional.linear(i["y"], i["w"])
    torch.testing.assert_close(b.truth["h"], h, rtol=1e-12, atol=1e-12)
    normed = torch.nn.functional.rms_norm(h, (56,), i["gamma"], eps=1e-6)
    torch.testing.assert_close(b.truth["hg"] * b.truth["rstd"][:, None], normed, rtol=1e-12, atol=1e-12)


def test_swiglu_is_that_of_separate_projections():
    b = Bench(SWIGLU, at(SPECS[SWIGLU], 40, 24, 56))
    i = {k: v.double() for k, v in b.inputs.items()}
    x = i["x"] * i["rstd"][:, None]  # the reference applies rstd after the product
    gate, up = x @ i["w"][0::2].mT, x @ i["w"][1::2].mT
    torch.testing.assert_close(b.truth["act"], silu(gate) * up, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(b.truth["preact"][:, 1::2], up, rtol=1e-12, atol=1e-12)


def test_backward_is_autograd():
    b = Bench(BACKWARD, at(SPECS[BACKWARD], 40, 24, 56))
    i = {k: v.double() for k, v in b.inputs.items()}
    z = i["z"].requires_grad_()
    act = silu(z[:, 0::2]) * z[:, 1::2]
    torch.nn.functional.linear(act, i["w_down"]).backward(i["dy"])
    torch.testing.assert_close(b.truth["dz"], z.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(b.truth["act"], act.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(b.truth["s"], (z * z.grad).sum(1).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_blocks_change_nothing(name, monkeypatch):
    sizes = at(SPECS[name], 300, 40, 56)
    whole = Bench(name, sizes)
    monkeypatch.setattr(reference, "BLOCK_BYTES", 1)
    assert reference._rows(SPECS[name], sizes)[1] == 128
    blocked = Bench(name, sizes)
    for key in whole.truth:
        torch.testing.assert_close(blocked.truth[key], whole.truth[key], rtol=1e-13, atol=1e-13)
    assert not whole.faults(blocked.yard)


def test_matmul_operands_are_rounded_and_other_values_are_not():
    text = "h = (y * 1.01) @ w.mT + x\nhg = linear(y * 1.01, w) * gamma\nrstd = (y * 1.01).sum(-1)"
    spec = SPECS[NORM].model_copy(update={"reference": text})
    sizes = at(spec, 20, 64, 30)
    i = draw(spec, sizes, 5)
    f = {k: v.float() for k, v in i.items()}
    product = (f["y"] * 1.01).bfloat16().double() @ f["w"].double().mT
    for got in (reference.fp32(spec, i, sizes), reference.yardstick(spec, i, sizes)):
        rtol = 1e-5 if got["h"].dtype == torch.float32 else 2**-8
        close = {"rtol": rtol, "atol": 2e-5}
        torch.testing.assert_close(got["h"].double(), product + i["x"].double(), **close)
        torch.testing.assert_close(got["hg"].double(), product * i["gamma"].double(), **close)
        torch.testing.assert_close(got["rstd"].double(), 1.01 * i["y"].double().sum(-1), rtol=1e-5, atol=1e-5)
    assert reference.yardstick(spec, i, sizes)["h"].dtype == torch.bfloat16


def test_what_is_drawn():
    spec, sizes = SPECS[NORM], at(SPECS[NORM], 300, 256, 128)
    first, again, other = draw(spec, sizes, 1), draw(spec, sizes, 1), draw(spec, sizes, 2)
    assert all(torch.equal(first[k], again[k]) and not torch.equal(first[k], other[k]) for k in first)
    assert first["y"].dtype == torch.bfloat16 and first["y"].shape == (300, 256)
    assert first["w"].double().std().item() == pytest.approx(1 / 16, rel=0.02)
    assert first["y"].double().std().item() == pytest.approx(1, rel=0.02)
    assert not torch.equal(first["y"][:, :128], first["x"])  # each input has its own random stream
    assert 0.5 <= first["gamma"].min() < first["gamma"].max() <= 1.5
    assert draw(spec, sizes, 1, family="positive")["y"].min() >= 0
    assert draw(spec, sizes, 1, family="tiny")["y"].double().std().item() == pytest.approx(2**-10, rel=0.02)
    with pytest.raises(ValueError, match="family 'vast' is unknown; use one of normal"):
        draw(spec, sizes, 1, family="vast")


# --- honest kernels ---------------------------------------------------------------------------------

SIZES = [(1, 16, 8), (3, 16, 8), (64, 64, 80), (129, 128, 136), (200, 40, 72), (256, 512, 384)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mkn", SIZES)
def test_honest_kernels_pass(name, mkn):
    for seed in range(3):
        for family in FAMILIES:
            bench = Bench(name, at(SPECS[name], *mkn), seed, family)
            assert bench.faults(kernel(name, bench.inputs)) == {}, (seed, family)


def test_independent_rounding_of_the_same_quality_passes():
    """The errors here are as large as the yardstick's errors but independent of them, as if the kernel
    rounded in other places than the yardstick."""
    generator = torch.Generator().manual_seed(0)
    for m, n in [(8, 8), (64, 80), (128, 8), (300, 400)]:
        for _ in range(20):
            bench = Bench(NORM, at(SPECS[NORM], m, 16, n), seed=7)
            truth = torch.randn(m, n, generator=generator, dtype=torch.float64)
            other = truth * (1 + 2**-9 * (torch.rand(m, n, generator=generator, dtype=torch.float64) - 0.5))
            bench.truth["h"], bench.yard["h"] = truth, truth.bfloat16()
            got = truth + (other - truth) * ((bench.yard["h"] - truth).norm() / (other - truth).norm())
            stats, tiles = error_sums.measure(got, truth, bench.yard["h"], torch.bfloat16)
            tile, excess, _ = error_gate._worst_tile(stats, tiles, 4)
            slack = 1 + 4 / math.sqrt(m * n)
            assert excess < 1.5 and stats.ratio(stats.e_max, stats.r_max) < 2 * slack
            assert abs(stats.slope - 1) < 2e-4 + 4 * stats.slope_error


# --- cheats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("gemm", [bf16_partials, without_first, fp8_operands])
def test_poor_matmuls_fail(benches, name, gemm):
    bench = benches[name]
    assert set(bench.faults(kernel(name, bench.inputs))) == set()
    faults = bench.faults(kernel(name, bench.inputs, gemm))
    spared = {"act"} if name == BACKWARD else set()  # act is recomputed from z, without a matmul
    assert set(faults) == set(bench.truth) - spared


@pytest.mark.parametrize("name", SPECS)
def test_a_small_factor_fails_and_is_named(benches, name):
    bench, got = benches[name], kernel(name, benches[name].inputs)
    for key, value in got.items():
        faults = bench.faults({**got, key: (bench.truth[key] * 1.002).to(value.dtype)})
        assert list(faults) == [key]
        assert f"output {key!r}" in faults[key] and "looks like a factor of 1.002" in faults[key]


def small_tanh(dtype):
    return Spec.model_validate(
        {
            "name": "small",
            "summary": "Hyperbolic tangent.",
            "dims": {"M": "rows", "N": "columns"},
            "inputs": {"x": {"shape": ("M", "N"), "dtype": "fp32"}},
            "outputs": {"y": {"shape": ("M", "N"), "dtype": dtype}},
            "reference": "y = tanh(x)",
            "cases": ({"name": "one", "M": 64, "N": 64},),
        }
    )


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_wrong_fp8_output_fails(dtype):
    x, stored = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), DTYPES[dtype]
    truth, yard = {"y": x.double().tanh()}, {"y": x.tanh().to(stored)}
    spec, given = small_tanh(dtype), (yard["y"], x.to(stored))
    (right,), (wrong,) = (compare(spec, {"y": y}, truth, yard) for y in given)
    assert right.passed and not wrong.passed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_cancels_near_1_is_named(dtype):
    spec = small_tanh(dtype)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 2.0**-18
    truth, stored = {"y": x.double().tanh()}, DTYPES[dtype]

    def hint(made):
        (error,) = compare(spec, {"y": made.to(stored)}, truth, {"y": x.tanh().to(stored)})
        return "" if error.passed else error.reason.rpartition("; ")[2]

    assert hint(x.tanh()) == ""
    assert hint(2 * (2 * x).sigmoid() - 1).startswith("looks like cancellation")
    for other in (torch.zeros(64, 64), -x, x.mT, x * 1.1, x.abs()):
        assert "cancellation" not in hint(other)


def test_a_factor_that_only_the_slope_sees(benches):
    bench, got = benches[SWIGLU], kernel(SWIGLU, benches[SWIGLU].inputs)
    got["preact"] = (bench.truth["preact"] * 1.0006).bfloat16()
    (error,) = [e for e in compare(bench.spec, got, bench.truth, bench.yard) if not e.passed]
    assert error.rms_ratio < 1.25 and error.slope == pytest.approx(1.0006, abs=1e-4)
    assert "slope" in error.reason


@pytest.mark.parametrize("name", SPECS)
def test_a_wrong_place_fails(benches, name):
    bench, got = benches[name], kernel(name, benches[name].inputs)
    for key, value in got.items():
        zeros, tail, row = torch.zeros_like(value), value.clone(), value.clone()
        tail[256:], row[5] = 0, value[6]
        for wrong in (zeros, tail, row):
            assert list(bench.faults({**got, key: wrong})) == [key]
        assert "zero where the truth is not" in bench.faults({**got, key: zeros})[key]
        assert "rows 256 to 299" in bench.faults({**got, key: tail})[key]
        if value.dim() == 2:
            column = value.clone()
            column[:, 131] = value[:, 132]
            assert "columns 128 to 255" in bench.faults({**got, key: column})[key]


def test_similar_outputs_swapped_fail(benches):
    got = kernel(NORM, benches[NORM].inputs)
    assert set(benches[NORM].faults({**got, "h": got["hg"], "hg": got["h"]})) == {"h", "hg"}
    got = kernel(BACKWARD, benches[BACKWARD].inputs)
    swapped = got["dz"].unflatten(1, (-1, 2)).flip(-1).flatten(1)
    assert set(benches[BACKWARD].faults({**got, "dz": swapped})) == {"dz"}


def test_a_single_element_counts(benches):
    bench, got = benches[SWIGLU], kernel(SWIGLU, benches[SWIGLU].inputs)
    got["act"][7, 200] += 0.25
    wrong, right = got["act"][7, 200].item(), bench.truth["act"][7, 200].item()
    assert f"at row 7, column 200: {wrong:.4g} instead of {right:.4g}" in bench.faults(got)["act"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_nothing_non_finite_passes(benches, value):
    bench, got = benches[NORM], kernel(NORM, benches[NORM].inputs)
    got["hg"][130, 7] = value
    assert "1 non-finite or wrongly finite values, the first at row 130, column 7" in bench.faults(got)["hg"]
    got["rstd"][9] = value
    assert set(bench.faults(got)) == {"hg", "rstd"}


def test_infinite_truth_is_expected_and_overflow_excused():
    truth = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth[0, 0], truth[0, 1], truth[0, 2] = math.inf, math.nan, 1e300
    honest = truth.bfloat16()
    stats, _ = error_sums.measure(honest, truth, honest, torch.bfloat16)
    assert stats.wrong == 0 and stats.e2 == stats.r2 > 0
    honest[0, 0] = 3.0
    stats, _ = error_sums.measure(honest, truth, honest, torch.bfloat16)
    assert stats.wrong == 1 and stats.first_wrong == (0, 0)


def test_what_overflows_in_the_reference_too_is_excused_and_nothing_else():
    truth = torch.full((40, 40), 3.0, dtype=torch.float64)
    yard, got = truth.bfloat16(), truth.bfloat16()
    got[7, 3] = math.inf

    def wrong() -> tuple[int, tuple[int, int]]:
        stats, _ = error_sums.measure(got, truth, yard, torch.bfloat16)
        return stats.wrong, stats.first_wrong

    assert wrong() == (1, (7, 3))
    yard[7, 9] = math.inf  # the yardstick overflows, although the truth is finite
    assert wrong()[0] == 0
    got[7, 4] = math.nan  # row 7 now has two non-finite values; the yardstick has only one there
    assert wrong() == (2, (7, 3))
    got[7, 4], got[8, 0] = 3.0, math.nan  # in row 8, the yardstick has no non-finite value
    assert wrong() == (1, (8, 0))
    got[8, 0], truth[1, 1] = 3.0, math.inf  # the truth is infinite, so the output must be
    assert wrong() == (1, (1, 1))


def test_one_overflow_of_the_yardstick_excuses_no_other():
    spec = SPECS[SWIGLU].model_copy(update={"outputs": {"preact": SPECS[SWIGLU].outputs["preact"]}})
    truth = torch.randn(256, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    yard, got = truth.bfloat16(), truth.bfloat16()
    yard[0, 0] = math.inf
    (error,) = compare(spec, {"preact": got}, {"preact": truth}, {"preact": yard})
    assert error.passed
    got[:, 4:] = math.nan
    (error,) = compare(spec, {"preact": got}, {"preact": truth}, {"preact": yard})
    assert not error.passed and f"{256 * 508} non-finite" in error.reason


def values(got: Tensor, truth: Tensor, yard: Tensor, allowed: limits.ErrorLimits = limits.VALUES) -> str:
    spec = SPECS[SWIGLU].model_copy(update={"outputs": {"preact": SPECS[SWIGLU].outputs["preact"]}})
    one, unrounded = {"preact": got}, error_gate.unrounded(spec)
    (error,) = compare(unrounded, one, {"preact": truth}, {"preact": yard}, allowed)
    return error.reason


def test_small_values_count_by_themselves():
    truth = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth[3:5] *= 1e-4
    yard = truth.float()
    assert values(yard * (1 + 2**-20), truth, yard) == ""
    tail = yard.clone()
    tail[3, 7] = 0
    assert "1 values off by much of themselves, the worst at row 3, column 7: 0 instead of " in values(
        tail, truth, yard
    )
    yard[4, 7] += 1e-4  # the yardstick's error is as large at an equally small value
    assert values(tail, truth, yard) == ""
    wide = yard.clone()
    wide[9, 9] *= 1.05
    assert "row 9, column 9" in values(wide, truth, yard)
    wide[9, 9] = truth[9, 9] * 1.03  # an error of up to 1/32 of the value is allowed
    assert values(wide, truth, yard) == ""


def test_rounding_before_a_row_sum_fails(benches):
    bench, got = benches[NORM], kernel(NORM, benches[NORM].inputs)
    rstd = torch.rsqrt(got["h"].double().square().mean(-1) + 1e-6).float()
    assert set(bench.faults({**got, "rstd": rstd})) == {"rstd"}


def test_a_missing_eps_fails_where_eps_decides():
    for family in FAMILIES:
        bench = Bench(NORM, at(SPECS[NORM], 200, 128, 256), family=family)
        got = kernel(NORM, bench.inputs)
        rstd = torch.rsqrt(bench.truth["h"].square().mean(-1)).float()
        # These four families cannot show the error. All others have rows near sqrt(eps), or exact sums of
        # squares.
        decides = family not in ("normal", "positive", "large", "huge")
        assert set(bench.faults({**got, "rstd": rstd})) == ({"rstd"} if decides else set()), family


# --- the gate itself --------------------------------------------------------------------------------


def test_chunks_change_nothing(benches, monkeypatch):
    bench, got = benches[BACKWARD], kernel(BACKWARD, benches[BACKWARD].inputs, bf16_partials)
    whole = compare(bench.spec, got, bench.truth, bench.yard)
    monkeypatch.setitem(exactness.CHUNK, "cpu", 1)  # 128 rows at a time
    for a, b in zip(whole, compare(bench.spec, got, bench.truth, bench.yard), strict=True):
        assert a.reason == b.reason and a.passed == b.passed
        assert a.tile_ratio == pytest.approx(b.tile_ratio) and a.slope == pytest.approx(b.slope, abs=1e-12)


def test_ratios_against_plain_arithmetic(benches):
    bench, got = benches[SWIGLU], kernel(SWIGLU, benches[SWIGLU].inputs, bf16_partials)
    error = compare(bench.spec, got, bench.truth, bench.yard)[0]
    t = bench.truth["preact"]
    e, r = got["preact"].double() - t, bench.yard["preact"].double() - t
    tiles = [
        (e[i : i + 128, j : j + 128].norm() / r[i : i + 128, j : j + 128].norm()).item()
        for i in range(0, t.shape[0], 128)
        for j in range(0, t.shape[1], 128)
    ]
    assert error.rms_ratio == pytest.approx((e.norm() / r.norm()).item())
    assert error.element_ratio == pytest.approx((e.abs().max() / r.abs().max()).item())
    assert any(error.tile_ratio == pytest.approx(tile) for tile in tiles)
    assert error.slope == pytest.approx(((got["preact"].double() * t).sum() / (t * t).sum()).item())


def test_the_worst_tile_is_the_one_that_exceeds_its_slack_most():
    """A tile with few elements has a wider limit than a full tile, because its error ratio scatters more. So
    the tile with the largest ratio must not hide a full tile that exceeds its own limit."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(129, 256, generator=generator, dtype=torch.float64)
    error = 2.0**-9 * torch.rand(129, 256, generator=generator, dtype=torch.float64)
    factor = torch.ones_like(truth)
    factor[:128, 128:] = 1.9  # beyond 1.5, the limit for a tile of 128x128
    factor[128:, :128] = 2.0  # within the limit for 128 elements
    yard, got = truth + error, truth + factor * error
    stats, tiles = error_sums.measure(got, truth, yard, torch.bfloat16)
    ratio, excess, at = error_gate._worst_tile(stats, tiles, limits.USUAL.deviations)
    assert at == (0, 1) and ratio == pytest.approx(1.9)
    assert excess == pytest.approx(1.9 / (1 + limits.USUAL.deviations / 128))


def test_an_exact_yardstick_leaves_room_for_fp32():
    truth = torch.arange(1.0, 4097).double().reshape(64, 64)
    exact = truth.float()
    near = exact * (1 + 2**-23)
    stats, tiles = error_sums.measure(near, truth, exact, torch.float32)
    assert stats.r2 == 0
    assert stats.ratio(math.sqrt(stats.e2 / stats.count), 0.0) < 4
    far, _ = error_sums.measure(exact * 1.00001, truth, exact, torch.float32)
    assert far.ratio(math.sqrt(far.e2 / far.count), 0.0) > 100


@pytest.mark.parametrize("long", [False, True])
def test_what_cancels_beside_a_long_extent_may_leave_more_in_a_loud_row_and_column(long):
    allowed = replace(limits.of_unrounded("normal", long), fp32_rms=math.inf, fp32_tile=math.inf)
    allowed = replace(allowed, fp32_element=math.inf)
    truth = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth[3] *= 8
    truth[:, 7] *= 8
    truth[3, 7] = truth[3, 8] = truth[20, 20] = 0.0
    yard = truth.float()
    for place, loud in (((3, 7), 35.0), ((3, 8), 4.4), ((20, 20), 1.0)):
        for share, off in ((0.6, False), (0.6 * loud, not long and loud > 1), (1.6 * loud, True)):
            got = yard.clone()
            got[place] = share * error_gate.CANCELLED * 2.0**-24 * truth.square().mean().sqrt()
            said = values(got, truth, yard, allowed)
            assert said.startswith("output 'preact': 1 values off") if off else said == "", (place, share)


def test_zero_truth_wants_zeros():
    zero = torch.zeros(8, 8)
    stats, _ = error_sums.measure(zero, zero.double(), zero, torch.float32)
    assert stats.ratio(stats.e_max, stats.r_max) == 0 and stats.slope == 1
    stats, _ = error_sums.measure(zero + 1e-20, zero.double(), zero, torch.float32)
    assert stats.ratio(stats.e_max, stats.r_max) > 1e20
    assert values(zero, zero.double(), zero) == ""
    for allowed in (limits.VALUES, replace(limits.VALUES, loud=True)):
        assert "64 values off by much of themselves" in values(zero + 1e-20, zero.double(), zero, allowed)


def test_tolerance_widens_the_limits(benches):
    bench = benches[SWIGLU]
    got = kernel(SWIGLU, bench.inputs, bf16_partials)
    wide = bench.spec.model_copy(update={"tolerance": Tolerance(factor=8.0, reason="for this test")})
    strict, lenient = (compare(spec, got, bench.truth, bench.yard) for spec in (bench.spec, wide))
    assert not any(e.passed for e in strict) and all("RMS" not in e.reason for e in lenient)


def test_a_wrong_dtype_is_our_bug(benches):
    bench, got = benches[NORM], kernel(NORM, benches[NORM].inputs)
    with pytest.raises(ValueError, match="output 'h' is torch.float32"):
        compare(bench.spec, {**got, "h": got["h"].float()}, bench.truth, bench.yard)


# --- exact outputs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    """Return a bench and the names of its exact outputs. The bench's inputs are small integers, so that every
    sum is exact."""
    bench = Bench(SWIGLU, at(SPECS[SWIGLU], 300, 512, 264), family="integers")
    values = reference.fp32(bench.spec, bench.inputs, bench.sizes)
    return bench, exactness.exact_outputs(values, bench.truth)


def exactly(bench: Bench, got: Outputs, exact: frozenset[str]) -> error_gate.OutputError:
    return compare(bench.spec, got, bench.truth, bench.yard, exact=exact)[0]


def test_what_sums_and_products_make_is_exact_and_what_functions_make_is_not(whole):
    bench, exact = whole
    assert exact == {"preact"}
    for family in set(FAMILIES) - {"integers"}:
        other = Bench(SWIGLU, at(SPECS[SWIGLU], 60, 64, 72), family=family)
        assert not exactness.exact_outputs(reference.fp32(other.spec, other.inputs, other.sizes), other.truth)
    for entry in compare(bench.spec, kernel(SWIGLU, bench.inputs), bench.truth, bench.yard, exact=exact):
        assert entry.passed and entry.unequal == (0 if entry.name == "preact" else None)


def test_other_orders_of_summation_are_exact_too(whole):
    bench, exact = whole

    def shuffled(a: Tensor, b: Tensor) -> Tensor:
        order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(1))
        return tensor_core(a[:, order], b[order])

    def split_k(a: Tensor, b: Tensor) -> Tensor:
        return tensor_core(a[:, 256:], b[256:]) + tensor_core(a[:, :256], b[:256])

    for gemm in (shuffled, split_k, lambda a, b: a.float() @ b.float()):
        assert exactly(bench, kernel(SWIGLU, bench.inputs, gemm), exact).unequal == 0


def one_product_dropped(a: Tensor, b: Tensor) -> Tensor:
    """A cheat: one output element of a hundred thousand lacks one product. It is the smallest non-zero
    product that the first element of K gives."""
    total, first = tensor_core(a, b), a[:, :1].float() * b[:1].float()
    least = first.abs() == first[first != 0].abs().min()
    at = int(total.abs().where(least, math.inf).argmin())
    total.view(-1)[at] -= first.view(-1)[at]
    return total


def one_column_rounded(a: Tensor, b: Tensor) -> Tensor:
    total = tensor_core(a, b)
    total[:, 131] = bf16_partials(a, b)[:, 131]
    return total


@pytest.mark.parametrize("gemm", [one_product_dropped, one_column_rounded, without_first, bf16_partials])
def test_one_wrong_bit_fails_where_all_must_be_right(whole, gemm):
    bench, exact = whole
    got = kernel(SWIGLU, bench.inputs, gemm)
    error = exactly(bench, got, exact)
    assert not error.passed and error.unequal == (bench.yard["preact"] != got["preact"]).sum() > 0
    assert (
        f"{error.unequal} of {300 * 528} values are not the truth rounded once, the first at row"
        in error.reason
    )


def test_it_sees_what_the_ratios_cannot(whole):
    bench, exact = whole
    got = kernel(SWIGLU, bench.inputs, one_product_dropped)
    error = exactly(bench, got, frozenset())
    assert error.passed and error.unequal is None
    assert exactly(bench, got, exact).unequal == 1


def test_a_negative_zero_is_a_zero(whole):
    bench, exact = whole
    got = kernel(SWIGLU, bench.inputs)
    zeros = got["preact"] == 0
    assert zeros.any()
    assert exactly(bench, {**got, "preact": got["preact"].where(~zeros, -0.0)}, exact).passed


def test_exactness_wants_bits_to_spare():
    whole = torch.tensor([[1.0, 2.0**21]])
    assert exactness._is_exact(whole, whole.double())
    for tight in (torch.tensor([[1.0, 2.0**22 + 1]]), torch.tensor([[1.0, math.inf]])):
        assert not exactness._is_exact(tight, tight.double())
    assert not exactness._is_exact(whole, whole.double() + 2.0**-40)
    assert exactness._is_exact(torch.zeros(2, 2), torch.zeros(2, 2).double())


def test_a_single_value_is_not_refused_by_luck():
    """If an output has a single element, the yardstick's error may happen to be far smaller than usual. Even
    then the correct value passes, and a wrong value fails."""
    spec = SPECS[BACKWARD]
    for seed in range(40):
        bench = Bench(BACKWARD, at(spec, 1, 128, 136), seed)
        got = kernel(BACKWARD, bench.inputs)
        assert bench.faults(got) == {}, seed
        assert set(bench.faults({**got, "s": got["s"] * -1})) == {"s"}


# --- specs reject every mutant ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mkn", [(200, 96, 136), (64, 64, 80)])
def test_no_mutant_survives(name, mkn):
    assert weak_spots(SPECS[name], at(SPECS[name], *mkn)) == []


def test_a_weak_spec_is_found_out():
    weak = SPECS[NORM].model_copy(
        update={"reference": SPECS[NORM].reference.replace("+ x", "+ x * 1e-9"), "constants": {"eps": 1e-30}}
    )
    assert "'y @ w.mT + x * 1e-09' without its second term" in weak_spots(weak, at(weak, 64, 64, 80))
