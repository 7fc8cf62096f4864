"""QuACK's epilogues for specs with a norm or a rotary embedding: entries of ``quack_library``."""

from __future__ import annotations

from dataclasses import replace
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

if TYPE_CHECKING:
    from torch import Tensor


def mean_rstd(sums: Tensor, squares: Tensor, columns: int, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm's mean and rstd of each row, both fp32 [M], from partial sums of shape [M, tiles]."""
    mean = sums.sum(-1) / columns
    return mean, (squares.sum(-1) / columns - mean * mean + eps).rsqrt()


def _finish_rms(partials: Tensors, *, columns: int, eps: float, rstd: Tensor) -> dict[str, Tensor]:
    """Run QuACK's second kernel, which writes the rows' rstd into the vector ``rstd``. The next GEMM may read
    this vector."""
    from quack.rms_final_reduce import _rms_final_reduce_out

    _rms_final_reduce_out(partials["sqsum"], rstd, 1 / columns, eps)
    return {"rstd": rstd}


# ── Norms ─────────────────────────────────────────────────────────────────────────────────────────────────


def _residual_rms(g: Given, w: Tensor, *, hg: str | None) -> tuple[QuackEpilogue, Tensor]:
    """The GEMM before an RMSNorm, and the vector that a later kernel fills with the norm's rstd."""
    from quack.epilogue.library import rms_partial_epi

    x, rstd = g.inputs["x"], fp32(w, g.inputs["x"].shape[0])
    outs = {"D": x.new_empty(x.shape), "resid_out": x.new_empty(x.shape)}
    names = {"resid_out": "h"} | ({"D": hg} if hg else {})
    finish = partial(_finish_rms, columns=x.shape[1], eps=g.number("eps"), rstd=rstd)
    y, operands = g.inputs["y"], {"weight": g.inputs["gamma"]}
    stage = QuackEpilogue(rms_partial_epi, y, w.mT, outs, names, c=x, operands=operands, finish=finish)
    return stage, rstd


def _residual_partial_rmsnorm(g: Given) -> tuple[QuackEpilogue, ...]:
    return (_residual_rms(g, g.inputs["w"], hg="hg")[0],)


def _residual_rmsnorm_gemm(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import row_scale

    first, rstd = _residual_rms(g, g.inputs["w_o"], hg=None)
    hg, w = first.outs["D"], g.inputs["w_up"]
    outs = {"D": hg.new_empty(hg.shape[0], w.shape[0])}
    return first, QuackEpilogue(row_scale, hg, w.mT, outs, {"D": "z"}, operands={"rstd": rstd})


def _residual_partial_layernorm(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import ln_partial

    y, w, x, eps = g.inputs["y"], g.inputs["w"], g.inputs["x"], g.number("eps")

    def finish(partials: Tensors) -> dict[str, Tensor]:
        mean, rstd = fused(mean_rstd)(partials["hsum"], partials["sqsum"], x.shape[1], eps)
        return {"mean": mean, "rstd": rstd}

    outs = {"D": x.new_empty(x.shape), "resid_out": x.new_empty(x.shape)}
    names, operands = {"D": "hg", "resid_out": "h"}, {"weight": g.inputs["gamma"]}
    return (QuackEpilogue(ln_partial, y, w.mT, outs, names, c=x, operands=operands, finish=finish),)


def _rms_bwd(g: Given, mod: Any, w: Tensor, names: dict[str, str]) -> QuackEpilogue:
    dz, h = g.inputs["dz"], g.inputs["h"]
    operands = {name: g.inputs[name] for name in ("h", "gamma", "rstd", "s")}
    finish = partial(column_sum, name="dgamma", out=fp32(h, h.shape[1]))
    outs = {name: h.new_empty(h.shape) for name in names}
    return QuackEpilogue(mod, dz, w, outs, names, c=g.inputs["dres"], operands=operands, finish=finish)


def _residual_rmsnorm_bwd(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import rms_bwd_recompute

    return (_rms_bwd(g, rms_bwd_recompute, g.inputs["w"], {"D": "dx", "hn": "hn"}),)


def _residual_rmsnorm_gemm_bwd(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.library import identity_epi

    from coda_agent.verifier.baselines.quack_composed import rms_bwd

    first, w = _rms_bwd(g, rms_bwd, g.inputs["w_up"], {"D": "dh"}), g.inputs["w_o"]
    dh = first.outs["D"]
    outs = {"D": dh.new_empty(dh.shape[0], w.shape[1])}
    return first, QuackEpilogue(identity_epi, dh, w, outs, {"D": "dy"})


# ── Rotary embedding ──────────────────────────────────────────────────────────────────────────────────────


def _rotated(g: Given, mod: Any, **operands: Any) -> QuackEpilogue:
    x, w = g.inputs["x"], g.inputs["w"]
    outs = {"D": x.new_empty(x.shape[0], w.shape[0])}
    return QuackEpilogue(mod, x, w.mT, outs, {"D": "q"}, operands=operands)


def _frequencies(g: Given) -> Tensor:
    """QuACK's table of frequencies for all columns of q. The table depends only on inv_freq and q's width."""
    from quack.epilogue.rotary import make_interleaved_inv_freq

    return make_interleaved_inv_freq(g.inputs["inv_freq"], g.inputs["w"].shape[0])


def _rope(g: Given) -> tuple[QuackEpilogue, ...]:
    """A rotation with a table of cosines and sines, which the kernel loads by TMA. QuACK's authors measured
    TMA and plain loads, and recommend TMA. The epilogue requires a bias. Here the bias is a scalar zero,
    which costs one addition."""
    from quack.epilogue.rotary import rope_table_epi

    return (_rotated(g, rope_table_epi, cs=g.inputs["cos_sin"], bias=0.0),)


def _rmsnorm_rope(g: Given) -> tuple[QuackEpilogue, ...]:
    from coda_agent.verifier.baselines.quack_composed import rstd_rope_table

    return (_rotated(g, rstd_rope_table, cs=g.inputs["cos_sin"], rstd=g.inputs["rstd"]),)


def _rope_positions(g: Given) -> tuple[QuackEpilogue, ...]:
    from quack.epilogue.rotary import rope_posfreq_epi

    return (_rotated(g, rope_posfreq_epi, pos=g.inputs["positions"], freq=_frequencies(g)),)


def _qk_norm_rope(g: Given) -> tuple[QuackEpilogue, ...]:
    """A norm and a rotation of heads; the kernel computes the angles. The library's own epilogue reads a
    table [M, head width] instead, and each call would have to fill this table first."""
    from coda_agent.verifier.baselines.quack_composed import HEAD_EPS, qk_rope_posfreq

    if g.constants["eps"] != HEAD_EPS:
        raise ValueError(f"eps is {g.constants['eps']}; QuACK's head norm was made for {HEAD_EPS}")
    gamma, heads = g.inputs["gamma"], g.sizes["H"]
    rstd = fp32(gamma, g.inputs["x"].shape[0], heads)
    angles = {"pos": g.inputs["positions"], "freq": _frequencies(g)}
    head = {"qk": gamma.shape[0], "w": gamma.repeat(heads), "rstd_out": rstd}
    return (replace(_rotated(g, qk_rope_posfreq, **angles, **head), finish=lambda _: {"rstd": rstd}),)


NORMS: dict[str, QuackImplementation] = {
    "gemm_residual_partial_rmsnorm": QuackImplementation("library", _residual_partial_rmsnorm),
    "gemm_residual_partial_rmsnorm_eps": QuackImplementation("library", _residual_partial_rmsnorm),
    "gemm_residual_rmsnorm_gemm": QuackImplementation("composed", _residual_rmsnorm_gemm),
    "gemm_residual_rmsnorm_gemm_eps": QuackImplementation("composed", _residual_rmsnorm_gemm),
    "gemm_residual_partial_layernorm": QuackImplementation("composed", _residual_partial_layernorm),
    "gemm_residual_partial_layernorm_eps": QuackImplementation("composed", _residual_partial_layernorm),
    "gemm_residual_rmsnorm_bwd": QuackImplementation("composed", _residual_rmsnorm_bwd),
    "gemm_residual_rmsnorm_gemm_bwd": QuackImplementation("composed", _residual_rmsnorm_gemm_bwd),
    "gemm_rope": QuackImplementation("library", _rope),
    "gemm_rmsnorm_rope": QuackImplementation("composed", _rmsnorm_rope),
    "gemm_rope_positions": QuackImplementation("library", _rope_positions),
    "gemm_qk_norm_rope": QuackImplementation("composed", _qk_norm_rope),
}
