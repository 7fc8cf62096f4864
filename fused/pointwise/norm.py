"""Compute a whole RMSNorm in one pass forward and one pass backward. A model's last norm is computed in this
way, because no GEMM kernel contains this norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda_agent.fused.ops import check_backward, check_forward_mode, check_torch_func
from coda_agent.fused.pointwise.programs import fused_on_gpu


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Compute ``x / rms(x) * gamma`` for ``x`` [..., D] and ``gamma`` [D], in the dtype of ``x``. Everything
    is computed in fp32 and rounded once. There is no second derivative."""
    if torch.compiler.is_compiling():
        return _normed(x, gamma, eps)[0]
    check_forward_mode((x, gamma))
    if torch.is_grad_enabled() and (x.requires_grad or gamma.requires_grad):
        check_torch_func()
    made: Tensor = _WholeNorm.apply(x, gamma, eps)
    return made


@fused_on_gpu
def _normed(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and the reciprocal RMS [..., 1]."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


@fused_on_gpu
def _gradients(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    unit, wide = x.float() * rstd, dy.float()
    pulled = wide * gamma.float()
    dx = rstd * (pulled - unit * (pulled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * unit).flatten(0, -2).sum(0).to(gamma.dtype)


class _WholeNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        made, rstd = _normed(x, gamma, eps)
        ctx.save_for_backward(x, gamma, rstd)
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(dy)
        dx, dgamma = _gradients(dy, *ctx.saved_tensors)
        x_wanted, gamma_wanted, _ = ctx.needs_input_grad
        return dx if x_wanted else None, dgamma if gamma_wanted else None, None
