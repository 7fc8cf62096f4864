# mypy: ignore-errors
# The DSL traces device code instead of running it, so the code's values have no Python types.
"""Epilogues composed from QuACK's operators, for specs whose outputs no epilogue of QuACK's library computes.

Most functions here are changed copies of a QuACK epilogue from ``quack.epilogue.library`` or
``quack.epilogue.rotary``. The function's docstring names QuACK's epilogue and the changes. As in QuACK, "col"
is a vector of length M and "row" a vector of length N. Importing this module imports QuACK.
"""

from __future__ import annotations

import cutlass.cute as cute
from quack.epilogue.frontend import gemm_epilogue, pack, unpack
from quack.epilogue.head_rmsnorm import HeadRstd
from quack.epilogue.ops import (
    ColVecLoad,
    ColVecReduce,
    ColVecSelect,
    OnlineLSEReduce,
    RowVecLoad,
    RowVecReduce,
    TileLoad,
)
from quack.epilogue.rotary import _angle_turns, _sincos_turns, rotary_cos_sin_load

HEAD_EPS = 1e-6  # fixed when QuACK's operator ``HeadRstd`` is created, below


@gemm_epilogue(ops={"rstd": ColVecLoad("rstd")})
def row_scale(acc, rstd):
    """Scale the rows: D = acc * rstd. QuACK's norm_act_mod without an activation computes the same, but would
    store the result twice."""
    return {"D": acc * rstd}


@gemm_epilogue(ops={"cs": rotary_cos_sin_load("cs"), "rstd": ColVecLoad("rstd")}, mode="acc_pair")
def rstd_rope_table(acc, cs, rstd):
    """QuACK's rope_table_epi, but with a row scale (as in rstd_rope_posfreq_epi) instead of a bias."""
    x1, x2 = unpack(acc * rstd)
    c, s = unpack(cs)
    return {"D": pack(x1 * c - x2 * s, x1 * s + x2 * c)}


def _squares(acc):
    return {"qk": acc * acc}


_head_rstd = HeadRstd("qk", eps=HEAD_EPS)


@gemm_epilogue(
    ops={"pos": ColVecLoad("pos"), "freq": RowVecLoad("freq"), "qk": _head_rstd, "w": RowVecLoad("w")},
    prepass=_squares,
    prepass_outs=("qk",),
    extra_ops=(_head_rstd.out("rstd_out"),),
    mode="acc_pair",
)
def qk_rope_posfreq(acc, pos, freq, qk, w):
    """QuACK's qk_rope_epi, but the kernel computes the angles (as in rope_posfreq_epi) and does not load them
    from a table. The kernel also stores each head's rstd (as in qknorm_epi)."""
    x1, x2 = unpack(acc * qk * w)
    s, c = _sincos_turns(*_angle_turns(pos, freq))
    return {"D": pack(x1 * c - x2 * s, x1 * s + x2 * c)}


_target = ColVecLoad("target")
_head_sinks = {
    "lse": OnlineLSEReduce("lse"),
    "target_logit": ColVecSelect("target_logit", idx_op=_target),
}


@gemm_epilogue(ops={"rstd": ColVecLoad("rstd")}, outs=_head_sinks, extra_ops=(_target,))
def rstd_lse_target(acc, rstd):
    """QuACK's rstd_lse_epi, but the kernel also stores the target's logit (as in lse_target_epi)."""
    v = acc * rstd
    return {"D": v, "lse": v, "target_logit": v}


@gemm_epilogue(outs=_head_sinks, extra_ops=(_target,))
def softcap_lse_target(acc, cap, reciprocal):
    """QuACK's lse_target_epi, but on capped logits. The cap uses the exact tanh, because fp32 outputs depend
    on the tanh's accuracy."""
    v = cute.math.tanh(acc * reciprocal) * cap
    return {"D": v, "lse": v, "target_logit": v}


@gemm_epilogue(
    outputs=("resid_out",),
    ops={"weight": RowVecLoad("weight")},
    reduces={"hsum": ColVecReduce("hsum"), "sqsum": ColVecReduce("sqsum", scaled=True)},
)
def ln_partial(acc, c, weight):
    """QuACK's ln_partial_epi without a bias."""
    y = acc + c
    return {"D": y * weight, "resid_out": y, "hsum": y, "sqsum": (y, y)}


_RMS_BWD_OPS = {
    "h": TileLoad("h"),
    "gamma": RowVecLoad("gamma"),
    "rstd": ColVecLoad("rstd"),
    "s": ColVecLoad("s"),
}


@gemm_epilogue(ops=_RMS_BWD_OPS, reduces={"dgamma": RowVecReduce("dgamma", scaled=True)})
def rms_bwd(acc, c, h, gamma, rstd, s):
    """QuACK's rms_bwd_apply_epi, but this kernel also applies rstd. It computes dx = dres + rstd * (acc *
    gamma - hhat * s), where hhat = h * rstd is the normalised h."""
    hhat = h * rstd
    return {"D": (acc * gamma - hhat * s) * rstd + c, "dgamma": (acc, hhat)}


@gemm_epilogue(outputs=("hn",), ops=_RMS_BWD_OPS, reduces={"dgamma": RowVecReduce("dgamma", scaled=True)})
def rms_bwd_recompute(acc, c, h, gamma, rstd, s):
    """Like ``rms_bwd``, but also store the norm's output hn = hhat * gamma, which the weight's gradient
    needs."""
    hhat = h * rstd
    dx = (acc * gamma - hhat * s) * rstd + c
    return {"D": dx, "hn": hhat * gamma, "dgamma": (acc, hhat)}
