"""Tests of the layer with QuACK's functions, on the CPU. QuACK's autograd functions are real; PyTorch
replaces the kernels."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from coda_agent.comparison import layers
from coda_agent.comparison.competitors import COLUMNS, HUMAN, LAYERS_ONLY, QUACK
from coda_agent.comparison.layers.errors import relative, results, truth
from coda_agent.comparison.layers.plain import Plain
from coda_agent.comparison.layers.shape import EPS, Shape, Weights, draw
from coda_agent.comparison.rows import LayerRow, OperatorRow

SMALL = Shape(heads=2, head_width=32, ffn=96, sequences=2, length=48)
GROUPED = Shape(heads=4, head_width=16, ffn=40, sequences=2, length=24, groups=2)
NAMES = {"y", "normed", "d x", *(f"d {name}" for name in Weights._fields)}
WORSE = 1.5  # an error above 1.5 times the plain bf16 layer's error is a mistake


class Kernels:
    """PyTorch in place of QuACK's kernels. ``eps`` records the eps of each norm in the forward, and
    ``products`` the shape of each product."""

    def __init__(self) -> None:
        self.eps: list[float] = []
        self.products: list[tuple[int, int, int]] = []

    def gemm(
        self, a: Tensor, b: Tensor, bias: None = None, out_dtype: Any = None, concat_layout: Any = ()
    ) -> Tensor:
        self.products.append((*a.shape, b.shape[1]))
        wide = a.float() @ b.float()
        if concat_layout and "B" in concat_layout and b.stride(-1) == 1:  # the rows of b are gate, then up
            wide = a.float() @ torch.stack(b.chunk(2), 1).flatten(0, 1).float()
        elif concat_layout and "B" in concat_layout:
            wide = torch.stack(wide.chunk(2, 1), -1).flatten(1)
        elif concat_layout:
            wide = torch.cat((wide[::2], wide[1::2]))
        return wide.to(out_dtype or a.dtype)

    def gemm_act(
        self, a: Tensor, b: Tensor, bias: None, activation: str, store_preact: bool, concat_layout: Any = ()
    ) -> tuple[Tensor | None, Tensor]:
        before = self.gemm(a, b, concat_layout=concat_layout)
        return before if store_preact else None, swiglu(before, activation)

    def gemm_dact(self, dout: Tensor, b: Tensor, before: Tensor, activation: str) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            before = before.detach().requires_grad_()
            after = swiglu(before, activation)
            return torch.autograd.grad(after, before, self.gemm(dout, b))[0], after.detach()

    def rmsnorm_fwd(
        self, x: Tensor, weight: Tensor, *, residual: Tensor | None, eps: float, store_rstd: bool, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        self.eps.append(eps)
        wide = x.float() if residual is None else x.float() + residual.float()
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
        out = (wide * rstd[:, None] * weight.float()).type_as(x)
        return out, x if residual is None else wide.type_as(residual), rstd if store_rstd else None

    def rmsnorm_bwd(
        self,
        x: Tensor,
        weight: Tensor,
        dout: Tensor,
        rstd: Tensor,
        dresidual: Tensor | None,
        *_: Any,
        **more: Any,
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        normed, scaled = x.float() * rstd[:, None], dout.float() * weight.float()
        dx = (scaled - normed * (normed * scaled).mean(-1, keepdim=True)) * rstd[:, None]
        dx = (dx if dresidual is None else dx + dresidual.float()).type_as(x)
        return dx, (dout.float() * normed).sum(0).type_as(weight), None, None if dresidual is None else dx

    def rotate(
        self, x: Tensor, cosine: Tensor, sine: Tensor, offsets: None, starts: None, out: Tensor, *how: int
    ) -> None:
        most, interleaved, conjugate = how
        assert not interleaved and cosine.is_contiguous() and most == x.shape[1]
        first, second = (t.float() for t in x.chunk(2, -1))
        cosine, sine = cosine.float()[:, None], sine.float()[:, None] * (-1 if conjugate else 1)
        out.copy_(torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1))


def swiglu(before: Tensor, activation: str) -> Tensor:
    assert activation == "swiglu"
    return (torch.nn.functional.silu(before[:, ::2].float()) * before[:, 1::2].float()).type_as(before)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    played = Kernels()
    linear, norms, rotary = (importlib.import_module(f"quack.{n}") for n in ("linear", "rmsnorm", "rotary"))

    def replaced(kernel: Any) -> Any:
        kernel, given = (kernel.func, kernel.keywords) if isinstance(kernel, partial) else (kernel, {})
        own = {name: value for name, value in given.items() if name == "concat_layout"}
        return partial(getattr(played, kernel.__name__), **own)

    for ops in [value for name, value in vars(linear).items() if name.endswith("Ops")]:
        for name, kernel in list(vars(ops).items()):
            if name.startswith("matmul") and not name.endswith("inplace"):
                monkeypatch.setattr(ops, name, replaced(kernel))
    monkeypatch.setattr(norms, "rmsnorm_fwd", played.rmsnorm_fwd)
    monkeypatch.setattr(norms, "rmsnorm_bwd", played.rmsnorm_bwd)
    monkeypatch.setattr(rotary, "_rotary_fwd_out", played.rotate)
    return played


@pytest.mark.parametrize("shape", [SMALL, GROUPED])
def test_it_is_the_layer_forward_and_backward(shape: Shape, kernels: Kernels) -> None:
    drawn = draw(shape, 16, "cpu")
    layer = layers.variant(QUACK, shape, drawn)
    exact = truth(shape, drawn)
    plain = relative(results(Plain(shape, drawn.weights, drawn.next_norm), drawn), exact)
    found = relative(results(layer, drawn), exact)
    assert found.keys() == NAMES and max(found[n] / plain[n] for n in exact) < WORSE, found
    assert kernels.eps == [EPS, EPS]
    d, f, wide, rows = shape.width, shape.ffn, sum(shape.projections), shape.tokens
    forward = [(rows, d, wide), (rows, d, d), (rows, d, 2 * f), (rows, f, d)]
    assert kernels.products[:4] == forward
    # the gradients of the input and of the weight
    backward = [p for m, k, n in forward for p in ((m, n, k), (n, m, k))]
    assert sorted(kernels.products[4:]) == sorted(backward)


def test_inference_is_the_training_forward_and_keeps_its_input(kernels: Kernels) -> None:
    drawn = draw(SMALL, 7, "cpu")
    layer = layers.variant(QUACK, SMALL, drawn)
    before = drawn.x.clone()
    assert torch.equal(layer.forward(drawn.x), layer.train(drawn.x)[0]) and torch.equal(drawn.x, before)
    first, second = (layer.step(drawn.x, drawn.dout) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_is_an_arm_of_the_human_column_for_layers_alone() -> None:
    (column,) = [column for column in COLUMNS if column.name == HUMAN]
    assert QUACK in column.arms and QUACK in LAYERS_ONLY
    row = LayerRow("1B", backward=True)
    assert QUACK in row.arms and row.absent(QUACK) is None and "attention" in row.note(QUACK)
    assert QUACK not in OperatorRow.arms
    assert not row.made_of(QUACK)
