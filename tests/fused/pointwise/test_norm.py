"""Tests of a model's last norm: result, gradients, frozen inputs, and the refusal of second derivatives."""

from __future__ import annotations

import pytest
import torch
from layer_parts import Where, loss_of
from torch import Tensor

from coda_agent.fused import ops
from coda_agent.fused.pointwise.norm import rms_norm


def plainly(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma


def drawn(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, gamma, dy = (torch.randn(*shape, generator=random) for shape in ((3, 5, 48), (48,), (3, 5, 48)))
    x, gamma, dy = (t.to(device, dtype) for t in (x, gamma, dy))
    return x.requires_grad_(), gamma.requires_grad_(), dy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 1.0])
def test_it_and_its_gradients_are_those_of_fp64(dtype: torch.dtype, eps: float, where: Where) -> None:
    x, gamma, dy = drawn(dtype, where.device)
    wide = (x.detach().double().requires_grad_(), gamma.detach().double().requires_grad_())
    exact = plainly(*wide, eps)
    found = rms_norm(x, gamma, eps)
    mine = (found, *torch.autograd.grad(found, (x, gamma), dy))
    close = 1e-6 if dtype == torch.float32 else 3e-3
    for each, true in zip(mine, (exact, *torch.autograd.grad(exact, wide, dy.double())), strict=True):
        assert each.dtype == dtype and loss_of(each.detach(), true.detach()) < close


@pytest.mark.parametrize("frozen", [0, 1])
def test_either_input_may_be_frozen(frozen: int, where: Where) -> None:
    x, gamma, dy = drawn(torch.float32, where.device)
    whole = torch.autograd.grad(rms_norm(x, gamma, 1e-6), (x, gamma), dy)
    (x, gamma)[frozen].requires_grad_(False)
    (found,) = torch.autograd.grad(rms_norm(x, gamma, 1e-6), (x, gamma)[1 - frozen], dy)
    assert torch.equal(found, whole[1 - frozen])


def test_a_second_derivative_is_refused() -> None:
    x, gamma, _ = drawn(torch.float32, "cpu")
    with pytest.raises(ops.NoBackward, match="no second derivative"):
        torch.autograd.grad(rms_norm(x, gamma, 1e-6).sum(), (x, gamma), create_graph=True)
