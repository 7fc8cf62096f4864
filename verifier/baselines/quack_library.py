"""QuACK's epilogues for each spec, from its library where possible.

``LIBRARY`` has an entry for each spec that QuACK can compute. The entry's kind says where the epilogue comes
from. ``library``: QuACK's own epilogue, unchanged. ``composed``: our epilogue from QuACK's operators, in
``verifier.baselines.quack_composed``. QuACK has no epilogue for:

- fp8 operands, since the library's epilogues take 16-bit operands;
- the backward of cross-entropy, since no operator provides a column's index;
- a head norm whose eps is an input, since QuACK's eps is fixed;
- a rotation of only some of several packed heads;
- grouped matmuls, where each expert has its own rows.

A call also completes the reductions that an epilogue leaves as partial results. The call uses the fastest
code that a user of QuACK has: QuACK's second kernel for RMSNorm, a torch sum, or a few operations under
torch.compile. Values that depend only on weights (rotary frequencies, or a head's weight repeated for every
head) are computed before the call. Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.verifier.baselines.quack_epilogue import (
    Given,
    QuackEpilogue,
    QuackImplementation,
    Tensors,
    column_sum,
    fp32,
    fused,
)
from coda_agent.verifier.baselines.quack_norms import NORMS

if TYPE_CHECKING:
    from torch import Tensor


def log_sum_exp(partials: Tensor) -> Tensor:
    """The log-sum-exp of each row, [M], from partial results of shape [M, tiles]."""
    return partials.logsumexp(-1)


# ── Projections ───────────────────────────────────────────────────────────────────────────────────────────


def _rmsnorm(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import row_scale

    x, w, rstd = g.inputs["x"], g.inputs["w"], g.inputs["rstd"]
    y = x.new_empty(x.shape[0], w.shape[0])
    return (QuackEpilogue(row_scale, x, w.mT, {"D": y}, {"D": "y"}, operands={"rstd": rstd}),)


def _layernorm(g: Given) -> tuple[QuackEpilogue, ...]:
    """A LayerNorm's projection. QuACK's epilogue needs rstd * mean as an input, so each call first computes
    that product."""
    import torch
    from quack.epilogue.library import ln_affine_epi

    x, w, mean, rstd = (g.inputs[n] for n in ("x", "w", "mean", "rstd"))
    shift = torch.empty_like(mean)
    operands = {"s": rstd, "t": shift, "wg": g.inputs["wg"], "wb": g.inputs["wb"]}
    start = partial(torch.mul, mean, rstd, out=shift)
    z = x.new_empty(x.shape[0], w.shape[0])
    return (QuackEpilogue(ln_affine_epi, x, w.mT, {"D": z}, {"D": "z"}, operands=operands, start=start),)


def _row_abs_max(g: Given) -> tuple[QuackEpilogue, ...]:
    import torch
    from quack.epilogue.library import amax_epi

    x, w = g.inputs["x"], g.inputs["w"]
    amax = fp32(x, x.shape[0])

    def finish(partials: Tensors) -> dict[str, Tensor]:
        return {"amax": torch.amax(partials["amax"], dim=-1, out=amax)}

    y = x.new_empty(x.shape[0], w.shape[0])
    return (QuackEpilogue(amax_epi, x, w.mT, {"D": y}, {"D": "y"}, finish=finish),)


def _alpha_residual(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import scaled_residual

    y, w, x = (g.inputs[n] for n in ("y", "w", "x"))
    outs, operands = {"D": x.new_empty(x.shape)}, {"alpha": g.inputs["alpha"]}
    return (QuackEpilogue(scaled_residual, y, w.mT, outs, {"D": "h"}, c=x, operands=operands),)


def _grad_accumulate(g: Given) -> tuple[QuackEpilogue, ...]:
    """Accumulate into the arm's own copy of dw. The copy is made before the first call, and each call adds to
    it."""
    from quack.epilogue.library import identity_epi

    dy, x, outs = g.inputs["dy"], g.inputs["x"], {"D": g.inputs["dw"].clone()}
    return (QuackEpilogue(identity_epi, dy.mT, x, outs, {"D": "dw_new"}, accumulate=True),)


# ── Activations ───────────────────────────────────────────────────────────────────────────────────────────


def _activated(g: Given, mod: Any, second: str, *, gated: bool, **operands: Tensor) -> QuackEpilogue:
    """An epilogue that stores x @ w.mT as preact, and the activation of preact as act. ``second``: QuACK's
    name for the output that holds the activation."""
    x, w = g.inputs["x"], g.inputs.get("w", g.inputs.get("w_gate_up"))
    assert w is not None  # every spec with an activation has one of these two inputs
    m, n = x.shape[0], w.shape[0]
    outs = {"D": x.new_empty(m, n), second: x.new_empty(m, n // 2 if gated else n)}
    return QuackEpilogue(mod, x, w.mT, outs, {"D": "preact", second: "act"}, operands=operands)


def _gated(g: Given, activation: str) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import linear_act_mod

    mod = linear_act_mod(activation, gated=True, has_c=False, has_rowvec=False, has_colvec=False)
    return (_activated(g, mod, "mAuxOut", gated=True),)


def _rmsnorm_swiglu(g: Given) -> tuple[QuackEpilogue, ...]:
    """Scale the rows, then apply SwiGLU. QuACK's rstd_swiglu_preact_epi is not used, because it stores the
    pre-activation before the row scale."""
    from quack.epilogue.library import norm_act_mod

    mod = norm_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=True)
    return (_activated(g, mod, "mAuxOut", gated=True, mColVecBroadcast=g.inputs["rstd"]),)


def _bias_gelu(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import linear_act_mod

    mod = linear_act_mod("gelu_tanh_approx", gated=False, has_c=False, has_rowvec=True, has_colvec=False)
    return (_activated(g, mod, "mAuxOut", gated=False, mRowVecBroadcast=g.inputs["bias"]),)


def _relu2(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import relu_sq_mod

    return (_activated(g, relu_sq_mod, "postact", gated=False),)


def _swiglu_mlp(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import identity_epi

    (first,), w = _gated(g, "swiglu"), g.inputs["w_down"]
    act = first.outs["mAuxOut"]
    outs = {"D": act.new_empty(act.shape[0], w.shape[0])}
    return first, QuackEpilogue(identity_epi, act, w.mT, outs, {"D": "out"})


def _swiglu_bwd(g: Given) -> tuple[QuackEpilogue, ...]:
    import torch
    from quack.epilogue.library import dswiglu_dpreact_mod

    dy, w, z = (g.inputs[n] for n in ("dy", "w_down", "z"))
    s = fp32(z, z.shape[0])

    def finish(partials: Tensors) -> dict[str, Tensor]:
        return {"s": torch.sum(partials["dsum"], dim=-1, out=s)}

    outs = {"D": z.new_empty(z.shape), "postact": z.new_empty(z.shape[0], w.shape[1])}
    names = {"D": "dz", "postact": "act"}
    return (QuackEpilogue(dswiglu_dpreact_mod, dy, w, outs, names, c=z, finish=finish),)


def _gelu_bwd(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import dgelu_dbias_mod

    dy, w, z = (g.inputs[n] for n in ("dy", "w_down", "z"))
    outs = {"D": z.new_empty(z.shape), "postact": z.new_empty(z.shape)}
    names = {"D": "dz", "postact": "act"}
    finish = partial(column_sum, name="dbias", out=fp32(z, z.shape[1]))
    return (QuackEpilogue(dgelu_dbias_mod, dy, w, outs, names, c=z, finish=finish),)


# ── Cross-entropy ─────────────────────────────────────────────────────────────────────────────────────────


def _cross_entropy(g: Given, mod: Any, *, stored: bool = True, **operands: Any) -> QuackEpilogue:
    """An epilogue that stores the log-sum-exp and the target's logit of each row. QuACK does not write
    target_logit for ignored rows, so each call first fills that output with zeros."""
    x, w = g.inputs["x"], g.inputs["w"]
    picked = fp32(x, x.shape[0])

    def finish(partials: Tensors) -> dict[str, Tensor]:
        return {"lse": fused(log_sum_exp)(partials["lse"]), "target_logit": picked}

    outs = {"D": x.new_empty(x.shape[0], w.shape[0])} if stored else {}
    names = {"D": "logits"} if stored else {}
    operands |= {"target": g.inputs["target"], "target_logit": picked}
    return QuackEpilogue(mod, x, w.mT, outs, names, operands=operands, start=picked.zero_, finish=finish)


def _partial_cross_entropy(g: Given, *, stored: bool = True) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import lse_target_epi

    return (_cross_entropy(g, lse_target_epi, stored=stored),)


def _rmsnorm_partial_cross_entropy(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import rstd_lse_target

    return (_cross_entropy(g, rstd_lse_target, rstd=g.inputs["rstd"]),)


def _softcap_cross_entropy(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import softcap_lse_target

    cap = g.number("cap")
    return (_cross_entropy(g, softcap_lse_target, cap=cap, reciprocal=1 / cap),)


LIBRARY: dict[str, QuackImplementation] = {
    "gemm_rmsnorm": QuackImplementation("composed", _rmsnorm),
    "gemm_layernorm": QuackImplementation("library", _layernorm),
    "gemm_row_abs_max": QuackImplementation("library", _row_abs_max),
    "gemm_alpha_residual": QuackImplementation("library", _alpha_residual),
    "gemm_grad_accumulate": QuackImplementation("library", _grad_accumulate),
    "gemm_swiglu": QuackImplementation("library", partial(_gated, activation="swiglu")),
    "gemm_geglu": QuackImplementation("library", partial(_gated, activation="geglu")),
    "gemm_rmsnorm_swiglu_fp16": QuackImplementation("library", _rmsnorm_swiglu),
    "gemm_rmsnorm_swiglu": QuackImplementation("library", _rmsnorm_swiglu),
    "gemm_bias_gelu": QuackImplementation("library", _bias_gelu),
    "gemm_relu2": QuackImplementation("library", _relu2),
    "gemm_swiglu_mlp": QuackImplementation("library", _swiglu_mlp),
    "gemm_swiglu_bwd": QuackImplementation("library", _swiglu_bwd),
    "gemm_gelu_bwd": QuackImplementation("library", _gelu_bwd, inexact=("dbias",)),
    "gemm_partial_cross_entropy": QuackImplementation("library", _partial_cross_entropy),
    "gemm_partial_cross_entropy_unstored": QuackImplementation(
        "library", partial(_partial_cross_entropy, stored=False)
    ),
    "gemm_rmsnorm_partial_cross_entropy": QuackImplementation("composed", _rmsnorm_partial_cross_entropy),
    "gemm_softcap_cross_entropy": QuackImplementation("composed", _softcap_cross_entropy),
    "gemm_softcap_cross_entropy_cap": QuackImplementation("composed", _softcap_cross_entropy),
} | NORMS


def quack_library(
    spec_name: str, inputs: Tensors, sizes: Mapping[str, int], constants: Mapping[str, float]
) -> tuple[QuackEpilogue, ...]:
    """QuACK's epilogues for one of our specs, in the order in which a call runs them. ``inputs`` are on the
    GPU. Raises ValueError if QuACK has no epilogue for this spec."""
    if spec_name not in LIBRARY:
        raise ValueError(f"QuACK has no epilogue for spec {spec_name!r}; there are {', '.join(LIBRARY)}")
    return LIBRARY[spec_name].build(Given(inputs, sizes, constants))
