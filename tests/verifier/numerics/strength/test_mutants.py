"""Mutants of references: each mutant exists for the right specs, and does what its name says."""

from __future__ import annotations

import ast

import pytest
import torch
from checkout import ROOT

from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.inputs import FAMILIES, ON_CPU, draw
from coda_agent.verifier.numerics.strength import mutants as made
from coda_agent.verifier.numerics.strength.mutants import ReferenceMutant, mutants
from coda_agent.verifier.numerics.strength.mutation_score import MutationSample, weak_spots
from coda_agent.verifier.spec.model import Spec

SPECS = ROOT / "specs"


def spec_of(name: str) -> Spec:
    return load(SPECS / f"gemm_{name}.yaml", check=False)


def at(spec: Spec, **sizes: int) -> dict[str, int]:
    return {dim: sizes.get(dim, 208) for dim in spec.dims}


def named(spec: Spec) -> dict[str, ReferenceMutant]:
    found = list(mutants(spec))
    assert len({m.name for m in found}) == len(found)
    return {m.name: m for m in found}


def test_the_slips_of_a_norm() -> None:
    spec = spec_of("residual_partial_rmsnorm")
    found = named(spec)
    assert found.keys() >= {
        "h zeroed",
        "hg times 1.002",
        "rstd negated",
        "h without its last rows",
        "h without its last columns",
        "hg with one wrong column",
        "h and hg swapped",
        "the last 16 of K dropped",
        "one element of K dropped",
        "matmul operands in fp8",
        "matmuls accumulated in bf16",
        "'(h * h).mean(-1) + eps' without its second term",
        "'y @ w.mT + x' with its sign flipped",
        "'(h * h).mean(-1)' along the other axis",
        "'(h * h).mean(-1)' as if over K=2048",  # in case 1B, N=2048 gives the same text
        "eps as 0",
    }
    assert found.keys() >= {
        "h with one wrong row",
        "h truncated, not rounded",
        "matmuls rounded to bf16",
        "matmuls added from two halves of K in bf16",
        "'h * gamma' without its second factor",
        "'(h * h).mean(-1)' without the last",
        "'(h * h).mean(-1)' over whole tiles",
        "'rsqrt((h * h).mean(-1) + eps)' as '1 / (sqrt((h * h).mean(-1)) + eps)'",
        "eps as 1e-05",
        "gamma one further",
        "h rounded to bf16",
    }
    assert "rstd truncated, not rounded" not in found and "hg rounded to bf16" not in found
    assert "rstd with one wrong column" not in found and "h and rstd swapped" not in found
    assert "rsqrt((h * h).mean(0) + eps)" in found["'(h * h).mean(-1)' along the other axis"].text
    assert "rsqrt((h * h).sum(-1) / 2048 + eps)" in found["'(h * h).mean(-1)' as if over K=2048"].text
    assert "(h * h).mean(-1) + 0.0" in found["eps as 0"].text


def test_approximate_functions() -> None:
    texts = [m.text for name in ("bias_gelu", "swiglu", "qk_norm_rope") for m in mutants(spec_of(name))]
    for wrong in (
        "act = gelu(preact)",
        "act = hardswish(preact[:, 0::2]) * preact[:, 1::2]",
        "preact * sigmoid(1.702 * preact)",
        "cos(angle.bfloat16().float())",
        "act = where(preact < -4.5, 0.0, gelu(preact, approximate='tanh'))",
        "act = where(preact[:, 0::2] < -7, 0.0, silu(preact[:, 0::2])) * preact[:, 1::2]",
        "0.5 * preact * (1 + tanh(0.7978 * (preact + 0.044715 * preact ** 3)))",
        "act = silu(preact[:, 1::2]) * preact[:, 1::2]",
        "odd, even = (t * rstd[:, :, None] * gamma).unflatten(2, (P, 2)).unbind(-1)",
        "(t * t).narrow(-1, 0, (t * t).shape[-1] - 1).mean(-1)",
        "pad(t * t, (0, -(t * t).shape[-1] % 128)).mean(-1)",
        "cos(angle - 6.2832 * round(angle / 6.2832))",
    ):
        assert any(wrong in text for text in texts), wrong


def test_wrong_choices_and_wrong_inputs() -> None:
    losses, backward = named(spec_of("partial_cross_entropy")), named(spec_of("residual_rmsnorm_bwd"))
    assert "target > 0" in losses["'target >= 0' as 'target > 0'"].text
    whole = losses["'logsumexp(logits, -1)' over whole tiles"].text
    assert "logsumexp(pad(logits, (0, -logits.shape[-1] % 128)), -1)" in whole
    assert any(name.endswith("always its first") for name in losses)
    assert "hhat = h * s[:, None]" in backward["s for rstd"].text
    assert "h * rstd.bfloat16().float()[:, None]" in backward["rstd in bf16"].text
    short = backward["'(d * hhat).sum(0)' without the last"].text
    assert "(d * hhat).narrow(0, 0, (d * hhat).shape[0] - 1).sum(0)" in short
    assert "dw rounded to bf16" not in named(spec_of("grad_accumulate"))  # dw is an input, not computed
    assert "act rounded to bf16" not in named(spec_of("swiglu_mlp"))  # its matmul rounds act to bf16 anyway


def test_only_a_spec_in_fp16_is_accumulated_in_it() -> None:
    fp16 = "matmuls accumulated in fp16"
    assert fp16 in named(spec_of("rmsnorm_swiglu_fp16")) and fp16 not in named(spec_of("rmsnorm_swiglu"))


def test_a_scalar_of_the_launch_has_literals_in_its_place() -> None:
    found = named(spec_of("residual_partial_rmsnorm_eps"))
    assert found.keys() >= {"eps as 0", "eps as 1e-06", "eps as 1e-05"}


@pytest.mark.parametrize("name", sorted(p.stem.removeprefix("gemm_") for p in SPECS.glob("*.yaml"))[::4])
def test_every_text_is_another_one_and_runs_or_fails_as_a_reference_does(name: str) -> None:
    spec = spec_of(name)
    own = ast.unparse(ast.parse(spec.reference))
    sizes = at(spec, H=3, P=16) | {"M": 40}
    inputs = draw(spec, sizes, 0)
    ran = 0
    for mutant in mutants(spec):
        assert mutant.spoken == (mutant.text != own), mutant.name
        try:
            reference.run(
                spec, {k: reference.cast(t, torch.float32) for k, t in inputs.items()}, sizes, mutant.text
            )
            ran += 1
        except reference.MISTAKES:
            continue
    assert ran > 8


def test_spoilt_matmuls() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 64, generator=generator), torch.randn(64, 30, generator=generator)
    torch.testing.assert_close(made._without_tail(a, b), a[:, :48] @ b[:48])
    torch.testing.assert_close(made._without_first(a, b), a @ b - a[:, :1] @ b[:1], rtol=1e-4, atol=1e-5)
    assert 0.01 < (made._in_fp8(a, b) - a @ b).norm() / (a @ b).norm() < 0.1
    assert 0.001 < (made._accumulated(a, b, torch.bfloat16) - a @ b).norm() / (a @ b).norm() < 0.01
    assert 0.0005 < (made._rounded(a, b) - a @ b).norm() / (a @ b).norm() < 0.004
    first, second = ((a[:, k : k + 32] @ b[k : k + 32]).bfloat16() for k in (0, 32))
    assert torch.equal(made._halved(a, b), first.float() + second.float())
    eight = (a * 100).to(torch.float8_e4m3fn)
    assert torch.equal(made._through_fp8(eight.bfloat16()), eight.float())


def test_a_poor_product_reaches_every_matmul() -> None:
    spec = spec_of("swiglu_mlp")
    sizes = at(spec) | {"M": 30}
    inputs = draw(spec, sizes, 0)
    got = reference.fp32(spec, inputs, sizes, product=lambda a, b: torch.zeros(*a.shape[:-1], b.shape[-1]))
    assert not any(t.any() for t in got.values())


def test_spoilt_outputs() -> None:
    output = torch.arange(1.0, 300 * 200 + 1).reshape(300, 200)
    rows = made._without_last_rows(output)
    assert torch.equal(rows[:256], output[:256]) and not rows[256:].any()
    column = made._one_wrong_column(output)
    assert int((column != output).sum()) == 300 and torch.equal(column[:, 100], output[:, 99])
    row = made._one_wrong_row(output)
    assert int((row != output).sum()) == 200 and torch.equal(row[150], output[149])
    cut = made._truncated(torch.tensor([1 + 2**-7 - 2**-20, -1.5 + 2**-20]), 16)
    assert cut.tolist() == [1.0, -1.4921875]
    whole = made._without_last_rows(output[:256])
    assert torch.equal(whole[:128], output[:128]) and not whole[128:].any()
    vector = made._without_last_rows(output[0])
    assert torch.equal(vector[:128], output[0, :128]) and not vector[128:].any()


@pytest.mark.parametrize("name", ["residual_partial_layernorm", "gelu_bwd", "row_abs_max"])
def test_the_wrong_axis_is_seen_on_square_shapes(name: str) -> None:
    spec = spec_of(name)
    assert any("other axis" in m.name for m in mutants(spec))
    assert weak_spots(spec, at(spec)) == []


def test_gelus_other_form_is_seen_unrounded_only() -> None:
    spec = spec_of("bias_gelu")
    (erf,) = [m for m in mutants(spec) if m.text.endswith("act = gelu(preact)")]
    trial = MutationSample.of(spec, at(spec), 0, "normal")
    got = reference.fp32(spec, trial.inputs, trial.sizes, erf.text)
    assert all(e.passed for e, _, _ in trial.errors(got))
    assert not trial.passes(erf) and trial.differs(erf)


def test_a_text_that_is_right_but_for_the_order_of_its_roundings_is_no_mutant() -> None:
    """With the cap, no logit exceeds 30, so the sum of exponentials is correct even if no maximum is
    subtracted. Without the cap, such a sum overflows."""
    name = "'logsumexp(logits, -1)' as 'log(exp(logits).sum(-1))'"
    capped, free = spec_of("softcap_cross_entropy"), spec_of("partial_cross_entropy")
    for spec in (capped, free):
        unshifted = named(spec)[name]
        trials = [MutationSample.of(spec, at(spec) | {"M": 64}, 0, family) for family in ("normal", "huge")]
        if spec is free:
            assert [trial.passes(unshifted) for trial in trials] == [True, False]
        else:
            assert all(trial.passes(unshifted) and not trial.differs(unshifted) for trial in trials)


def test_a_maximum_that_begins_at_zero_is_seen_where_all_is_far_below_it() -> None:
    spec = spec_of("partial_cross_entropy")
    (begun,) = [m for m in mutants(spec) if "relu(logits.amax" in m.text]
    seen = {
        f
        for f in (*FAMILIES, *ON_CPU)
        if not MutationSample.of(spec, at(spec) | {"M": 64}, 0, f).passes(begun)
    }
    assert seen == {"negative"}


@pytest.mark.parametrize("seed", [4, 8])
def test_the_ends_of_a_range_tell_comparisons_apart(seed: int) -> None:
    """With these seeds, purely random targets contain no 0, so the mutant ``target > 0`` would not differ
    from the reference. The mutant differs because both ends of the range are always drawn."""
    spec = spec_of("partial_cross_entropy")
    (moved,) = [m for m in mutants(spec) if m.name == "'target >= 0' as 'target > 0'"]
    trial = MutationSample.of(spec, at(spec) | {"M": 300}, seed, "normal")
    assert trial.differs(moved) and not trial.passes(moved)


def test_a_text_that_says_the_same_is_no_mutant() -> None:
    """One mutant divides a head's sum by case 1B's H=32 instead of by the number of columns. At the sizes of
    this test a head has 32 columns, so the mutant computes the correct mean."""
    spec = spec_of("qk_norm_rope")
    names = [m.name for m in mutants(spec) if "as if over H=32" in m.name]  # P=32 gives the same text
    assert names and not set(names) & set(weak_spots(spec, at(spec, H=3, P=16) | {"M": 64}))
