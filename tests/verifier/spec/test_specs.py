"""The shipped specs: each reference computes the layer that its spec describes, and no spec lets a wrong
kernel pass.

A truth computes a spec's outputs by PyTorch's own layers and autograd, in fp64. Some inputs are statistics of
rows, such as ``rstd``, but have random values. A truth may first replace these values by the statistics of a
forward pass, because a deferred norm equals the norm only if its statistics are correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from torch import Tensor

from coda_agent.primitives.lang.interpret import saturated
from coda_agent.verifier.baselines.pytorch import formulation
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.numerics.error_gate import compare
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.strength.mutation_score import weak_spots
from coda_agent.verifier.numerics.values import DTYPES
from coda_agent.verifier.spec.model import Spec

pytestmark = pytest.mark.slow

SHIPPED = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))
EPS = 1e-6
SMALL = {"M": 24, "K": 10, "N": 14, "D": 12, "F": 18, "V": 22, "H": 3, "G": 2, "P": 4}
RAGGED = {"M": 300, "K": 144, "N": 208, "D": 144, "F": 208, "V": 208, "H": 7, "G": 3, "P": 16}
SMALL, RAGGED = SMALL | {"T": 24, "E": 3}, RAGGED | {"T": 300, "E": 5}

HEADS = {size["G"]: size["H"] for size in (SMALL, RAGGED)}  # number of q heads, by number of k heads

Tensors = dict[str, Tensor]
Truth = Callable[[Tensors], Tensors]
TRUTHS: dict[str, Truth] = {}


def truth(*names: str) -> Callable[[Truth], Truth]:
    """Register a function that computes the outputs of the specs ``names`` without using their references."""

    def register(function: Truth) -> Truth:
        TRUTHS.update(dict.fromkeys((f"gemm_{name}" for name in names), function))
        return function

    return register


def shipped(name: str) -> Spec:
    return load(ROOT / "specs" / f"{name}.yaml", check=False)


def at(spec: Spec, sizes: dict[str, int]) -> dict[str, int]:
    return {dim: sizes[dim] for dim in spec.dims}


# --- truth ------------------------------------------------------------------------------------------


def halves(t: Tensor) -> tuple[Tensor, ...]:
    return t.unflatten(1, (-1, 2)).unbind(2)


def rotated(t: Tensor, turn: Tensor) -> Tensor:
    """Read each pair of adjacent columns as a complex number, and multiply the P numbers of each head by
    ``turn`` [M, P]."""
    return torch.view_as_real(torch.view_as_complex(t.unflatten(1, (-1, turn.shape[1], 2))) * turn[:, None])


def turns(i: Tensors) -> Tensor:
    return torch.exp(1j * torch.outer(i["positions"].double(), i["inv_freq"]))


def eps_of(i: Tensors, constant: float = EPS) -> float:
    return float(i["eps"]) if "eps" in i else constant


def routed(i: Tensors, rows: Tensor) -> Tensor:
    """Multiply each row by the weight of its own expert, one row at a time."""
    experts = len(i["w"])
    ranges = zip(range(experts), i["offsets"][:-1].tolist(), i["offsets"][1:].tolist(), strict=True)
    of = {row: expert for expert, first, past in ranges for row in range(first, past)}
    return torch.stack([i["w"][of[row]] @ rows[row] for row in range(len(rows))])


@truth("grouped_swiglu")
def _(i: Tensors) -> Tensors:
    preact = routed(i, i["x"])
    gate, up = halves(preact)
    return {"preact": preact, "act": F.silu(gate) * up}


@truth("gathered_swiglu")
def _(i: Tensors) -> Tensors:
    preact = routed(i, torch.stack([i["x"][token] for token in i["index"].tolist()]))
    gate, up = halves(preact)
    return {"preact": preact, "act": F.silu(gate) * up}


@truth("grouped_down")
def _(i: Tensors) -> Tensors:
    return {"y": torch.diag(i["routed"]) @ routed(i, i["act"])}


@truth("grouped_swiglu_bwd")
def _(i: Tensors) -> Tensors:
    z, routed_ = i["z"].requires_grad_(), i["routed"].requires_grad_()
    gate, up = halves(z)
    act = F.silu(gate) * up * routed_[:, None]
    y = routed({"w": i["w_down"], "offsets": i["offsets"]}, act)
    dz, d_routed = torch.autograd.grad(y, (z, routed_), i["dy"])
    return {"dz": dz, "act": act.detach(), "drouted": d_routed}


@truth("grouped_weight_grad")
def _(i: Tensors) -> Tensors:
    w = torch.zeros(len(i["offsets"]) - 1, i["dz"].shape[1], i["x"].shape[1]).double().requires_grad_()
    y = routed({"w": w, "offsets": i["offsets"]}, i["x"])
    return {"dw": torch.autograd.grad(y, w, i["dz"])[0]}


@truth("residual_partial_rmsnorm", "residual_partial_rmsnorm_eps")
def _(i: Tensors) -> Tensors:
    h = F.linear(i["y"], i["w"]) + i["x"]
    return {"h": h, "hg": h * i["gamma"], "rstd": 1 / (h.square().sum(1) / h.shape[1] + eps_of(i)).sqrt()}


@truth("residual_partial_layernorm", "residual_partial_layernorm_eps")
def _(i: Tensors) -> Tensors:
    h = F.linear(i["y"], i["w"]) + i["x"]
    variance, mean = torch.var_mean(h, 1, correction=0)
    return {"h": h, "hg": h * i["gamma"], "mean": mean, "rstd": (variance + eps_of(i, 1e-5)) ** -0.5}


@truth("alpha_residual")
def _(i: Tensors) -> Tensors:
    return {"h": torch.addmm(i["x"], i["y"], i["w"].mT, alpha=float(i["alpha"]))}


@truth("rmsnorm")
def _(i: Tensors) -> Tensors:
    h, i["rstd"] = i["x"], 1 / (i["x"].square().mean(1) + EPS).sqrt()
    return {"y": F.linear(F.rms_norm(h, h.shape[1:], None, EPS), i["w"])}


@truth("layernorm")
def _(i: Tensors) -> Tensors:
    h, gamma, beta = i["x"], torch.linspace(0.5, 2, i["x"].shape[1]).double(), i["x"][0].cos()
    variance, i["mean"] = torch.var_mean(h, 1, correction=0)
    i |= {"x": h * gamma, "rstd": (variance + EPS) ** -0.5, "wg": i["w"] @ gamma, "wb": i["w"] @ beta}
    return {"z": F.linear(F.layer_norm(h, h.shape[1:], gamma, beta, EPS), i["w"])}


@truth("swiglu", "rmsnorm_swiglu", "rmsnorm_swiglu_fp16")
def _(i: Tensors) -> Tensors:
    preact = F.linear(i["x"], i["w"]) * i.get("rstd", torch.ones(1))[:, None]
    gate, up = halves(preact)
    return {"preact": preact, "act": gate * up / (1 + torch.exp(-gate))}


@truth("geglu")
def _(i: Tensors) -> Tensors:
    preact = F.linear(i["x"], i["w"])
    return {"preact": preact, "act": F.gelu(halves(preact)[0], approximate="tanh") * halves(preact)[1]}


@truth("bias_gelu")
def _(i: Tensors) -> Tensors:
    preact = F.linear(i["x"], i["w"], i["bias"])
    inner = math.sqrt(2 / math.pi) * (preact + 0.044715 * preact**3)
    return {"preact": preact, "act": preact / 2 * (1 + torch.tanh(inner))}


@truth("relu2")
def _(i: Tensors) -> Tensors:
    preact = F.linear(i["x"], i["w"])
    return {"preact": preact, "act": torch.clamp(preact, min=0) ** 2}


@truth("swiglu_mlp")
def _(i: Tensors) -> Tensors:
    preact = F.linear(i["x"], i["w_gate_up"])
    act = F.silu(halves(preact)[0]) * halves(preact)[1]
    return {"preact": preact, "act": act, "out": F.linear(act, i["w_down"])}


@truth("rope", "rmsnorm_rope")
def _(i: Tensors) -> Tensors:
    t = F.linear(i["x"], i["w"]) * i.get("rstd", torch.ones(1))[:, None]
    return {"q": rotated(t, torch.complex(*halves(i["cos_sin"]))).flatten(1)}


@truth("qkv_rope", "rmsnorm_qkv_rope", "rmsnorm_qkv_bias_rope", "rmsnorm_qkv_norm_rope")
def _(i: Tensors) -> Tensors:
    """Compute q, k and v by separate products, with the three weights that checkpoints store."""
    turn = torch.complex(*halves(i["cos_sin"]))
    width, x = 2 * turn.shape[1], i["x"] * i.get("rstd", torch.ones(1))[:, None]
    groups = next(g for g in HEADS if len(i["w"]) == (HEADS[g] + 2 * g) * width)
    sizes = (HEADS[groups] * width, groups * width, groups * width)
    weights, biases = i["w"].split(sizes), i.get("bias", torch.zeros(len(i["w"])).double()).split(sizes)
    q, k, v = (F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    if "gamma_q" in i:
        q, k = (
            F.rms_norm(t.unflatten(1, (-1, width)), (width,), i[f"gamma_{name}"], eps_of(i)).flatten(1)
            for name, t in (("q", q), ("k", k))
        )
    return {"q": rotated(q, turn).flatten(1), "k": rotated(k, turn).flatten(1), "v": v}


@truth("rope_positions")
def _(i: Tensors) -> Tensors:
    return {"q": rotated(F.linear(i["x"], i["w"]), turns(i)).flatten(1)}


@truth("qk_norm_rope", "qk_norm_rope_eps")
def _(i: Tensors) -> Tensors:
    t = F.linear(i["x"], i["w"]).unflatten(1, (-1, len(i["gamma"])))
    normed = F.rms_norm(t, t.shape[2:], i["gamma"], eps_of(i))
    rstd = (t.square().sum(2) / t.shape[2] + eps_of(i)) ** -0.5
    return {"q": rotated(normed.flatten(1), turns(i)).flatten(1), "rstd": rstd}


@truth("row_abs_max")
def _(i: Tensors) -> Tensors:
    y = F.linear(i["x"], i["w"])
    return {"y": y, "amax": torch.linalg.vector_norm(y, math.inf, 1)}


@truth("fp8_tensor_scale")
def _(i: Tensors) -> Tensors:
    return {"y": F.linear(i["x"] * i["scale"], i["w"])}


@truth("fp8_row_scale")
def _(i: Tensors) -> Tensors:
    return {"y": torch.einsum("mk,nk,m,n->mn", i["x"], i["w"], i["sx"], i["sw"])}


def scaled(i: Tensors, a: str, scale: str) -> Tensor:
    return torch.einsum("mk,nk,m,n->mn", i[a], i["w"], i[scale], i["sw"])


def quantised(i: Tensors, t: Tensor) -> Tensor:
    """Multiply by the delayed scale, and clamp to the range of e4m3."""
    return torch.minimum((t * i["scale"]).abs(), torch.tensor(448.0)) * t.sign()


@truth("fp8_swiglu")
def _(i: Tensors) -> Tensors:
    gate, up = halves(scaled(i, "x", "sx"))
    act = gate * up / (1 + torch.exp(-gate))
    return {"act": quantised(i, act), "amax": torch.linalg.vector_norm(act, math.inf, 1)}


@truth("fp8_bias_gelu")
def _(i: Tensors) -> Tensors:
    act = F.gelu(scaled(i, "x", "sx") + i["bias"], approximate="tanh")
    return {"act": quantised(i, act), "amax": torch.linalg.vector_norm(act, math.inf, 1)}


@truth("fp8_gelu_blocks")
def _(i: Tensors) -> Tensors:
    act = F.gelu(scaled(i, "x", "sx"), approximate="tanh").reshape(len(i["x"]), -1, 128)
    largest = torch.linalg.vector_norm(act, math.inf, 2).clamp(min=1e-6)
    return {"act": (448 * act / largest[..., None]).flatten(1), "scale": largest / 448}


@truth("fp8_residual_rmsnorm")
def _(i: Tensors) -> Tensors:
    h = scaled(i, "y", "sy") + i["x"]
    amax = torch.linalg.vector_norm(h * i["gamma"], math.inf, 1)
    rstd = 1 / (h.square().sum(1) / h.shape[1] + EPS).sqrt()
    return {"h": h, "hg": quantised(i, h * i["gamma"]), "rstd": rstd, "amax": amax}


@truth("partial_cross_entropy", "partial_cross_entropy_unstored", "rmsnorm_partial_cross_entropy")
def _(i: Tensors) -> Tensors:
    return losses(F.linear(i["x"], i["w"]) * i.get("rstd", torch.ones(1))[:, None], i["target"])


@truth("softcap_cross_entropy", "softcap_cross_entropy_cap")
def _(i: Tensors) -> Tensors:
    cap = float(i.get("cap", 30))
    return losses(cap * torch.tanh(F.linear(i["x"], i["w"]) / cap), i["target"])


def losses(logits: Tensor, target: Tensor) -> Tensors:
    loss = F.cross_entropy(logits, target, reduction="none")  # 0 where the target is -100
    lse = logits.exp().sum(1).log()
    return {"logits": logits, "lse": lse, "target_logit": torch.where(target == -100, 0, lse - loss)}


@truth("cross_entropy_bwd")
def _(i: Tensors) -> Tensors:
    logits = F.linear(i["x"], i["w"]).requires_grad_()
    i["lse"] = logits.detach().exp().sum(1).log()
    i["dloss"] = torch.where(i["target"] == -100, 0, i["dloss"])
    loss = F.cross_entropy(logits, i["target"], reduction="none")
    return gradients(loss, i["dloss"], dlogits=logits)


def gradients(output: Tensor, gradient: Tensor, **inputs: Tensor) -> Tensors:
    found = torch.autograd.grad(output, tuple(inputs.values()), gradient)
    return dict(zip(inputs, found, strict=True))


@truth("swiglu_bwd")
def _(i: Tensors) -> Tensors:
    z = i["z"].clone().requires_grad_()
    act = F.silu(halves(z)[0]) * halves(z)[1]
    dz = gradients(F.linear(act, i["w_down"]), i["dy"], dz=z)["dz"]
    return {"dz": dz, "act": act, "s": torch.linalg.vecdot(dz, i["z"])}


@truth("gelu_bwd")
def _(i: Tensors) -> Tensors:
    before, bias = i["z"].clone().requires_grad_(), torch.zeros(i["z"].shape[1]).double().requires_grad_()
    act = F.gelu(before + bias, approximate="tanh")
    return {"act": act, **gradients(F.linear(act, i["w_down"]), i["dy"], dz=before, dbias=bias)}


@truth("grad_accumulate")
def _(i: Tensors) -> Tensors:
    w = torch.zeros_like(i["dw"]).requires_grad_()
    return {"dw_new": i["dw"] + gradients(F.linear(i["x"], w), i["dy"], dw=w)["dw"]}


@truth("residual_rmsnorm_gemm", "residual_rmsnorm_gemm_eps")
def _(i: Tensors) -> Tensors:
    h = F.linear(i["y"], i["w_o"]) + i["x"]
    rstd = (h.square().mean(1) + eps_of(i)) ** -0.5
    return {"h": h, "rstd": rstd, "z": rstd[:, None] * F.linear(h * i["gamma"], i["w_up"])}


@truth("residual_rmsnorm_bwd", "residual_rmsnorm_gemm_bwd")
def _(i: Tensors) -> Tensors:
    """Differentiate the deferred chain z = rstd * ((h * gamma) @ w.mT). The input s is computed from z and
    dz."""
    h, gamma = i["h"].clone().requires_grad_(), i["gamma"].clone().requires_grad_()
    w_o = i.get("w_o", torch.zeros(h.shape[1], 3).double())
    y = torch.zeros(len(h), w_o.shape[1]).double().requires_grad_()
    stream = F.linear(y, w_o) + h
    rstd = (stream.square().mean(1) + EPS) ** -0.5
    z = rstd[:, None] * F.linear(stream * gamma, i["w_up"] if "w_up" in i else i["w"])
    i |= {"rstd": rstd.detach(), "s": torch.linalg.vecdot(i["dz"], z).detach() / h.shape[1]}
    both, from_both = torch.cat((z, stream), 1), torch.cat((i["dz"], i["dres"]), 1)
    found = gradients(both, from_both, dx=h, dgamma=gamma, dy=y)
    return {**found, "dh": found["dx"], "hn": F.rms_norm(h, h.shape[1:], gamma, EPS)}


def test_every_spec_has_a_truth():
    assert set(TRUTHS) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_reference_and_baseline_are_the_layer(name):
    spec = shipped(name)
    sizes = at(spec, SMALL)
    inputs = {key: reference.cast(t, torch.float64) for key, t in draw(spec, sizes, 1).items()}
    if "target" in inputs:
        inputs["target"][3] = -100
    expected = TRUTHS[name](inputs)
    narrow = "_scaled_mm", "grouped_mm"  # these operators do not accept fp64
    texts = [t for t in (spec.reference, spec.baseline) if t and not any(name in t for name in narrow)]
    for got in (reference.run(spec, inputs, sizes, text) for text in texts):
        for output, declared in spec.outputs.items():
            held = saturated(got[output], declared.dtype)
            torch.testing.assert_close(held, expected[output], rtol=1e-9, atol=1e-11)


# --- what is measured -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_the_measured_formulation_runs_on_the_inputs_as_they_are(name):
    spec = shipped(name)
    sizes = at(spec, RAGGED)
    inputs = draw(spec, sizes, 2)
    expected = reference.oracle(spec, inputs, sizes)
    got = formulation(spec, sizes)(*inputs.values())
    for output, declared in spec.outputs.items():
        assert got[output].dtype == DTYPES[declared.dtype]
        error = got[output].double() - expected[output]
        allowed = max(0.02, torch.finfo(got[output].dtype).eps / 3)
        assert error.square().mean().sqrt() < allowed * expected[output].square().mean().sqrt(), output


@pytest.mark.parametrize("name", SHIPPED)
def test_cases_are_the_models_and_a_decoding_step(name):
    spec = shipped(name)
    cases = {case.name: case for case in spec.cases}
    measured = {case.name for case in spec.cases if case.name not in ("decode", "ragged")}
    if "E" in spec.dims:
        assert measured >= {"qwen3-30b", "mixtral-8x7b"}
        return
    assert measured >= {"1B", "7B", "70B"}
    for case in measured:
        assert cases[case].sizes["M"] == 16384
        assert cases[case].bench == ("report" if "fp8" in name else True)
    assert cases["decode"].sizes == cases["7B"].sizes | {"M": 128} and cases["decode"].bench == "report"
    assert cases["ragged"].sizes["M"] == 1000 and cases["ragged"].bench is False


# --- strength ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_no_mutant_gets_through(name):
    spec = shipped(name)
    assert weak_spots(spec, at(spec, RAGGED)) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_rows_can_be_cut_unless_the_matmul_sums_over_them(name):
    summed = name == "gemm_grad_accumulate"
    rows = "M" if "M" in shipped(name).dims else "T"
    assert reference.row_dim(shipped(name)) == (None if summed else (rows, False))


ROUNDED = "preact.bfloat16().float()[:, 0::2]"
SLIPS = [
    ("rope", "(H, P, 2)).unbind(-1)", "(H, 2, P)).unbind(2)"),  # a pair has one column of each half
    ("rope", "even * cos - odd * sin", "even * cos + odd * sin"),
    ("rmsnorm_rope", " * rstd[:, None]", ""),
    ("qkv_rope", "(2 * (H + G) * P, 2 * G * P), 1)\n", "(2 * G * P, 2 * (H + G) * P), 1)[::-1]\n"),  # v first
    ("rmsnorm_qkv_rope", " * rstd[:, None]", ""),
    ("rmsnorm_qkv_bias_rope", "(x @ w.mT) * rstd[:, None] + bias", "((x @ w.mT) + bias) * rstd[:, None]"),
    ("rmsnorm_qkv_norm_rope", "normed[:, H:H + G] * gamma_k", "normed[:, H:H + G] * gamma_q"),
    ("rmsnorm_qkv_norm_rope", "v = heads[:, H + G:]", "v = (heads * heads.abs().rsqrt())[:, H + G:]"),
    ("rope_positions", "* inv_freq", "* inv_freq.bfloat16().float()"),
    ("qk_norm_rope", " * gamma).unflatten(2, (P, 2))", ").unflatten(2, (P, 2))"),
    ("qk_norm_rope", "(t * t).mean(-1)", "(t * t).mean((1, 2))[:, None].expand(-1, H)"),
    ("swiglu", "preact[:, 0::2]", ROUNDED),
    ("geglu", "preact[:, 0::2]", ROUNDED),
    ("relu2", "relu(preact)", "relu(preact.bfloat16().float())"),
    ("bias_gelu", "gelu(preact, approximate='tanh')", "silu(preact)"),
    ("swiglu_mlp", "silu", "gelu"),
    ("partial_cross_entropy", "target >= 0", "target >= -100"),
    ("partial_cross_entropy", "logsumexp(logits, -1)", "logsumexp(logits.bfloat16().float(), -1)"),
    ("partial_cross_entropy_unstored", "logits.gather", "logits.bfloat16().float().gather"),
    ("rmsnorm_partial_cross_entropy", "logsumexp(logits, -1)", "logsumexp(x @ w.mT, -1)"),
    ("softcap_cross_entropy", "cap * tanh((x @ w.mT) / cap)", "x @ w.mT"),
    ("cross_entropy_bwd", "where(onehot, p - 1, p)", "p"),
    ("cross_entropy_bwd", "arange(V,", "arange(1, V + 1,"),
    ("residual_rmsnorm_bwd", "* s[:, None]", "* s[:, None] / N"),
    ("residual_rmsnorm_bwd", "(d * hhat).sum(0)", "(d.bfloat16() * hhat).sum(0)"),
    ("residual_rmsnorm_gemm", "rstd[:, None] * gamma", "rstd[:, None]"),
    ("residual_rmsnorm_gemm_bwd", "dh @ w_o", "d @ w_o"),
    ("gelu_bwd", "dz.sum(0)", "dz.bfloat16().float().sum(0)"),
    ("alpha_residual", "alpha * ", ""),
    ("grad_accumulate", "dy.mT @ x", "(dy.mT @ x).bfloat16()"),
    ("residual_partial_layernorm", "(h * h).mean(-1) - mean * mean", "h.var(-1)"),
    ("layernorm", "mean[:, None] * wg", "wg"),
    ("row_abs_max", "y.abs().amax(-1)", "y.amax(-1)"),
    ("row_abs_max", "y.abs()", "y.bfloat16().float().abs()"),
    ("fp8_row_scale", " * sw", ""),
    ("fp8_tensor_scale", "w.mT", "w.bfloat16().mul(1.01).float().mT"),
]


@pytest.mark.parametrize(("name", "old", "new"), SLIPS)
def test_a_plausible_slip_is_caught(name, old, new):
    spec = shipped(f"gemm_{name}")
    sizes = at(spec, RAGGED)
    assert old in spec.reference
    inputs = draw(spec, sizes, 3)
    expected, yard = reference.oracle(spec, inputs, sizes), reference.yardstick(spec, inputs, sizes)
    got = reference.yardstick(spec, inputs, sizes, spec.reference.replace(old, new))
    assert all(error.passed for error in compare(spec, yard, expected, yard))
    assert not all(error.passed for error in compare(spec, got, expected, yard))
