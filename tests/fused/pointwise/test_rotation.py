"""Tests of the backward of the rotation, which rotates gradients back. One test compares the PyTorch
implementation with autograd. Another test runs the Triton kernel in Triton's interpreter, and compares the
kernel with the PyTorch implementation."""

from __future__ import annotations

import subprocess
import sys
from os import environ, pathsep
from pathlib import Path

import pytest
import torch
from layer_parts import Counted
from torch import Tensor

from coda_agent.fused import functional
from coda_agent.fused.pointwise.rotation import Three, _operator, plainly

SHAPES = [(2, 4, 4, 8, 64), (1, 6, 2, 5, 128), (2, 3, 1, 7, 32)]  # sequences, heads, groups, length, width
HERE = Path(__file__)


def drawn(shape: tuple[int, ...]) -> tuple[Three, Three, Tensor, Tensor]:
    sequences, heads, groups, length, width = shape
    torch.manual_seed(1)
    tokens, every = sequences * length, (heads, groups, groups)
    q, k, v = (torch.randn(sequences, length, h, width).bfloat16().transpose(1, 2) for h in every)
    packed = torch.randn(tokens, sum(every) * width).bfloat16()
    a, b, c = packed.split([h * width for h in every], 1)
    angle = torch.rand(tokens, width // 2)
    cos_sin = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    return (q, k.contiguous(), v), (a, b, c), cos_sin, torch.rand(tokens)


def forward(z: Tensor, heads: int, groups: int, cos_sin: Tensor) -> list[Tensor]:
    """Split ``z`` into q, k and v, and rotate q and k. Each result has the shape [tokens, heads, width]."""
    width = cos_sin.shape[1]
    even, odd = z.view(len(z), -1, width // 2, 2).unbind(-1)
    cosine, sine = cos_sin.view(len(z), 1, -1, 2).unbind(-1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(2)
    plain = z.view(len(z), -1, width)
    return [turned[:, :heads], turned[:, heads : heads + groups], plain[:, heads + groups :]]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_autograd(shape):
    gradients, _, cos_sin, rstd = drawn(shape)
    _, heads, groups, _, width = shape
    z = torch.randn(len(rstd), (heads + 2 * groups) * width, dtype=torch.float64, requires_grad=True)
    outs = forward(z, heads, groups, cos_sin.double())
    rows = [d.transpose(1, 2).flatten(0, 1).double() for d in gradients]
    (exact,) = torch.autograd.grad(outs, z, rows)
    q, k, v = (t.detach().flatten(1) for t in outs)
    found, sums = plainly(gradients, (q, k, v), cos_sin, rstd)
    torch.testing.assert_close(found.double(), exact * rstd[:, None], rtol=0.01, atol=0.01)
    torch.testing.assert_close(sums.double(), (exact * z.detach()).sum(1), rtol=1e-4, atol=1e-3)


def test_a_chains_pointwise_part_is_the_derived_one():
    """The hand-written function that replaces the derived program computes the same values."""
    (_, heads, groups, _, width), length = SHAPES[0], 16
    _, values, cos_sin, rstd = drawn(SHAPES[0])
    link = functional.ATTENTION_IN[False, True]
    ((wrt, by_hand),) = link.by_hand.items()
    derived = link.derived(wrt)
    d = torch.randn(length, (heads + 2 * groups) * width).bfloat16()
    known = {"d_qkv": d, "qkv": torch.cat(values, 1), "cos_sin": cos_sin, "rstd_in": rstd}
    known["turned"] = float((heads + groups) * width)
    sizes = {"M": length, "D": 96, "H": heads + 2 * groups, "P": width // 2}
    usual = link._head(wrt, derived.head, d.dtype)(known, sizes)
    found = link._pointwise(wrt, derived.head, known, sizes)
    assert found.keys() == usual.keys() and len(found) == 2
    for name, each in found.items():
        torch.testing.assert_close(each, usual[name], rtol=0.01, atol=1e-4)
        assert each.dtype == usual[name].dtype
    apart = d.split([h * width for h in (heads, groups, groups)], 1)
    for one, other in zip(by_hand(known | {"d_qkv": apart}, sizes), by_hand(known, sizes), strict=True):
        assert torch.equal(one, other)
    assert by_hand(known | {"turned": 64.0}, sizes) is None


def test_torch_compile_can_call_the_operator():
    torch.library.opcheck(_operator, drawn(SHAPES[0]))


def test_one_graph_serves_any_number_of_rows():
    counted = Counted("eager")
    compiled = torch.compile(_operator, backend=counted, fullgraph=True, dynamic=True)
    for length in (3, 5, 8):
        compiled(*drawn((2, 4, 4, length, 64)))
    assert counted.graphs == 1


@pytest.mark.slow
def test_one_pass_equals_pytorch():
    """This file runs in a new process, because Triton reads TRITON_INTERPRET when a kernel is decorated."""
    told = environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(HERE)], env=told, check=True, timeout=120)


if __name__ == "__main__":
    from coda_agent.fused.pointwise.rotation_kernels import in_one_pass

    for each in SHAPES:
        inputs = drawn(each)
        for one, other in zip(in_one_pass(*inputs), plainly(*inputs), strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=0.01, atol=1e-4)
