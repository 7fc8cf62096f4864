"""Operators as people write them in PyTorch. None of these operators has a spec in ``specs/``, so no author
has seen them. Each of the last six operators needs a function that the kernel language (``primitives``)
lacks. The obvious composition of existing primitives overflows or is too inaccurate.

``coda-agent new benchmarks/operators.py:NAME --no-input --out NAME.yaml OPTIONS``, with the OPTIONS below,
scaffolds a spec without hints. ``coda-agent generate NAME.yaml`` then has a model author a kernel for the
spec. docs/results.md has the results of these runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

OPTIONS = {
    "dyt_linear": (
        "--shape x=M,K --shape w=N,K --shape alpha= --shape gamma=N --shape beta=N --dtype alpha=fp32"
    ),
    "layer_scale": (
        "--shape x=M,N --shape y=M,K --shape w=N,K --shape gamma=N --shape keep=M --dtype keep=fp32"
    ),
    "gated_attention_output": "--shape y=M,K --shape w=N,K --shape gate=M,N --shape x=M,N",
    "relu2_bwd": "--shape dy=M,D --shape w_down=D,F --shape z=M,F",
    "geglu_bwd": "--shape dy=M,D --shape w_down=D,F --shape z=M,2*F",
    "z_loss_head": "--shape x=M,K --shape w=V,K --dtype loss=fp32 --dtype lse=fp32",
    "cosine_heads": "--shape x=M,K --shape w=H*P,K --shape scale=P --shape bias=H*P --dim P=64",
    "squared_error_head": "--shape x=M,K --shape w=N,K --shape target=M,N --dtype loss=fp32",
    "column_statistics": "--shape x=M,K --shape w=N,K --dtype mean=fp32 --dtype var=fp32",
    "swiglu_clamped": "--shape x=M,D --shape w=2*F,D --shape bias=2*F --dtype amax=fp32",
    "mish_linear": "--shape x=M,K --shape w=N,K --shape bias=N",
    "erf_gelu_bwd": "--shape dy=M,D --shape w_down=D,F --shape z=M,F",
    "smoothed_head": ("--shape x=M,K --shape w=V,K --shape target=M --dtype target=int32 --dtype loss=fp32"),
    "sigmoid_loss_head": "--shape x=M,K --shape w=N,K --shape sign=M,N --dtype loss=fp32",
    "selu_statistics": "--shape x=M,K --shape w=N,K --dtype mean=fp32 --dtype least=fp32",
    "elu_linear": "--shape x=M,K --shape w=N,K --shape bias=N",
}


def dyt_linear(x, w, alpha, gamma, beta):
    """Projection with dynamic tanh in place of a norm."""
    return torch.tanh(alpha * F.linear(x, w)) * gamma + beta


def layer_scale(x, y, w, gamma, keep):
    """Output projection with layer scale, stochastic depth by row, and the residual."""
    return x + keep[:, None] * (gamma * F.linear(y, w))


def gated_attention_output(y, w, gate, x):
    """Output projection of gated attention, with the residual and its sum of squares."""
    h = x + torch.sigmoid(gate) * F.linear(y, w)
    s = (h.float() * h.float()).sum(-1)
    return {"h": h, "s": s}


def relu2_bwd(dy, w_down, z):
    """Backward of a squared ReLU: the pre-activation's gradient, and the recomputed activation."""
    r = F.relu(z)
    return {"dz": (dy @ w_down) * 2 * r, "act": r * r}


def geglu_bwd(dy, w_down, z):
    """Backward of GeGLU (tanh form), with gate and up in adjacent columns."""
    d = dy @ w_down
    gate, up = z[:, 0::2], z[:, 1::2]
    t = torch.tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    act = 0.5 * gate * (1 + t)
    slope = 0.5 * (1 + t) + 0.3989422804014327 * gate * (1 - t * t) * (1 + 0.134145 * gate * gate)
    dz = torch.stack([d * up * slope, d * act], -1).flatten(1)
    return {"dz": dz, "out": act * up}


def z_loss_head(x, w, coefficient=1e-4):
    """Language-model head with the z-loss of every row. The logits are not stored."""
    lse = torch.logsumexp(F.linear(x, w).float(), -1)
    return {"loss": coefficient * lse * lse, "lse": lse}


def cosine_heads(x, w, scale, bias, *, P=64, eps=1e-6):
    """Query projection whose heads have unit length, times a learned scale for each column of a head."""
    q = (F.linear(x, w) + bias).unflatten(-1, (-1, P))
    unit = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + eps)
    return (unit * scale).flatten(-2)


def squared_error_head(x, w, target):
    """Regression head with its residuals and the mean squared error of every row."""
    r = F.linear(x, w) - target
    return {"r": r, "loss": (r.float() * r.float()).mean(-1)}


def column_statistics(x, w, eps=1e-5):
    """Projection with the statistics of a batch norm: mean and variance of every column."""
    y = F.linear(x, w)
    mean = y.float().mean(0)
    var = (y.float() * y.float()).mean(0) - mean * mean
    return {"y": y, "mean": mean, "var": var + eps}


def swiglu_clamped(x, w, bias, limit=7.0):
    """SwiGLU with a bias and clamped inputs, and every row's largest magnitude."""
    z = F.linear(x, w) + bias
    gate, up = z[:, 0::2], z[:, 1::2]
    gate = torch.clamp(gate, max=limit)
    up = torch.clamp(up, min=-limit, max=limit)
    act = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return {"act": act, "amax": act.float().abs().amax(-1)}


def mish_linear(x, w, bias):
    """Projection with Mish."""
    return F.mish(F.linear(x, w) + bias)


def erf_gelu_bwd(dy, w_down, z):
    """Backward of GELU in its exact form, with the recomputed activation."""
    cdf = 0.5 * (1 + torch.erf(z * 0.7071067811865476))
    slope = cdf + z * 0.3989422804014327 * torch.exp(-0.5 * z * z)
    return {"dz": (dy @ w_down) * slope, "act": z * cdf}


def smoothed_head(x, w, target, smoothing=0.1):
    """Cross-entropy of every row with label smoothing. The logits are not stored."""
    logits = F.linear(x, w).float()
    picked = logits.gather(1, target[:, None]).squeeze(1)
    loss = torch.logsumexp(logits, -1) - (1 - smoothing) * picked - smoothing * logits.mean(-1)
    return {"loss": loss}


def sigmoid_loss_head(x, w, sign):
    """Contrastive head with the pairwise sigmoid loss: one sign per pair, summed over a row."""
    z = (F.linear(x, w) * sign).float()
    return {"loss": -F.logsigmoid(z).sum(-1)}


def selu_statistics(x, w):
    """SELU with each row's mean and smallest value."""
    h = F.selu(F.linear(x, w))
    return {"h": h, "mean": h.float().mean(-1), "least": h.float().amin(-1)}


def elu_linear(x, w, bias):
    """Projection with a bias and ELU."""
    return F.elu(F.linear(x, w) + bias)
