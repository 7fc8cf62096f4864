"""Tests of the norms and the rotation of packed heads. One test compares the PyTorch implementation with
Hugging Face's modules. The other test runs the Triton kernels in Triton's interpreter, and compares their
results and gradients with those of the PyTorch implementation."""

from __future__ import annotations

import subprocess
import sys
from os import environ
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coda_agent.fused.pointwise.heads import _InOnePass, of_a_chain, plainly

SHAPES = [(2, 4, 2, 9, 64), (1, 9, 3, 5, 128), (3, 2, 2, 4, 32)]  # sequences, heads, groups, length, width
HERE, EPS = Path(__file__), 1e-5


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    sequences, heads, groups, length, width = shape
    torch.manual_seed(2)
    angle = torch.rand(1, length, width) * 6  # the two halves of a head may have different angles
    gammas = [torch.rand(width, dtype=dtype) + 0.5 for _ in range(2)]
    packed = torch.randn(sequences * length, (heads + 2 * groups) * width, dtype=dtype)
    return packed, angle.cos().to(dtype), angle.sin().to(dtype), gammas


@pytest.mark.parametrize("normed", [False, True])
def test_equals_hugging_face(normed):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    packed, cos, sin, gammas = drawn(SHAPES[0], torch.float32)
    sequences, heads, groups, length, width = SHAPES[0]
    parts = packed.split([n * width for n in (heads, groups, groups)], -1)
    q, k, v = (t.view(sequences, length, -1, width) for t in parts)
    if normed:
        norms = [Qwen3RMSNorm(width, EPS) for _ in gammas]
        for norm, gamma in zip(norms, gammas, strict=True):
            norm.weight.data = gamma
        q, k = (norm(t) for norm, t in zip(norms, (q, k), strict=True))
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    found = plainly(packed, cos, sin, groups, tuple(gammas) if normed else None, EPS)
    for one, other in zip(found, (q, k, v.transpose(1, 2)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_one_pass_equals_pytorch():
    """This file runs in a new process, because Triton reads TRITON_INTERPRET when a kernel is decorated."""
    told = {**environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, str(HERE)], env=told, check=True, timeout=300)


def compare(shape: tuple[int, ...], normed: bool, each_own: bool) -> None:
    """Compare the Triton kernels with PyTorch and its autograd. ``each_own``: every sequence has its own
    angles."""
    packed, cos, sin, gammas = drawn(shape, torch.bfloat16)
    if each_own:
        cos, sin = (t.repeat(shape[0], 1, 1) + torch.arange(shape[0])[:, None, None] / 8 for t in (cos, sin))
    inputs = [packed, *gammas][: 3 if normed else 1]
    found = []
    for in_one_pass in (True, False):
        own = [t.clone().requires_grad_() for t in inputs]
        if in_one_pass:
            made = _InOnePass.apply(own[0], cos, sin, shape[2], *(own[1:] or (None, None)), EPS)
        else:
            made = plainly(own[0], cos, sin, shape[2], (own[1], own[2]) if normed else None, EPS)
        torch.manual_seed(3)
        coming = [torch.randn_like(t) for t in made]
        coming[0] = coming[0].contiguous()  # attention may return a gradient whose layout is not that of q
        d, *d_gammas = torch.autograd.grad(made, own, coming)
        sums = []
        if normed and not in_one_pass:  # in fp32, because the kernel sums values before it rounds them
            wide = [t.detach().float().requires_grad_() for t in own]
            exact = plainly(wide[0], cos, sin, shape[2], (wide[1], wide[2]), EPS)
            (d_wide,) = torch.autograd.grad(exact, wide[0], [t.float() for t in coming])
            sums = [(d_wide * wide[0].detach()).sum(1)]
        if in_one_pass and normed:  # the backward attaches the sums of rows to the gradient d
            rstd = torch.rand(len(d)) + 0.5
            carried = of_a_chain({"d_qkv": d, "rstd_in": rstd}, {"D": 48})
            assert carried and carried[0] is d
            sums = [carried[1] * -48 / rstd.square()]
            d.add_(0)
            assert of_a_chain({"d_qkv": d, "rstd_in": rstd}, {"D": 48}) is None
        found.append([*made, d, *d_gammas, *sums])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)


if __name__ == "__main__":
    for each in SHAPES:
        for normed in (False, True):
            compare(each, normed, each_own=normed)
