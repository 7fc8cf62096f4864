"""The layer as a user writes it in PyTorch. The variants with torch.compile compile this same layer. The
layer's results in fp32 are the truth for all variants."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from coda_agent.comparison.layers.layer import Gradients, Layer
from coda_agent.comparison.layers.shape import EPS, Shape, Weights, rotary

Rotary = tuple[Tensor, Tensor]
Function = Callable[[Shape, Tensor, Weights, Rotary], Tensor]


def rmsnorm(x: Tensor, gamma: Tensor) -> Tensor:
    """Compute RMSNorm: normalize in fp32, then multiply by the weight in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).type_as(x) * gamma


def rotated(t: Tensor, turn: Rotary) -> Tensor:
    """Rotate t [..., length, head width] by the angles of ``shape.rotary``. The two columns of a rotated pair
    are half a head apart."""
    cosine, sine = turn
    first, second = t.chunk(2, -1)
    return t * cosine + torch.cat((-second, first), -1) * sine


def layer(shape: Shape, x: Tensor, weights: Weights, turn: Rotary) -> Tensor:
    """Compute the pre-norm layer, x [tokens, D] -> [tokens, D], in x's dtype."""
    qkv = linear(rmsnorm(x, weights.attention_norm), weights.qkv)
    q, k, v = (shape.apart(t) for t in qkv.split(shape.projections, 1))
    q, k = rotated(q, turn), rotated(k, turn)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups > 0)
    h = x + linear(shape.together(mixed), weights.out)
    gate, up = linear(rmsnorm(h, weights.ffn_norm), weights.gate_up).chunk(2, -1)
    return h + linear(silu(gate) * up, weights.down)


class Differentiated(Layer[Tensor, tuple[Tensor, Tensor]]):
    """A layer that is a function of x and ``parameters``; autograd computes the backward. The stream between
    stacked layers is only x, the residual stream."""

    def __init__(self, shape: Shape, parameters: Mapping[str, Tensor], next_norm: Tensor):
        self.shape, self.next_norm = shape, next_norm
        self.parameters = {name: t.detach().requires_grad_() for name, t in parameters.items()}
        cosine, sine = rotary(shape, next_norm.device)
        self.turn = cosine.type_as(next_norm), sine.type_as(next_norm)

    @abstractmethod
    def call(self, x: Tensor) -> Tensor:
        """The layer's function, x [tokens, D] -> [tokens, D]."""

    def start(self, x: Tensor) -> Tensor:
        return x

    def forward(self, stream: Tensor) -> Tensor:
        with torch.no_grad():
            return self.call(stream)

    def train(self, stream: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = stream.detach().requires_grad_()
        y = self.call(x)
        return y.detach(), (x, y)

    def backward(self, saved: tuple[Tensor, Tensor], dout: Tensor) -> Gradients:
        x, y = saved
        found = torch.autograd.grad(y, (x, *self.parameters.values()), dout)
        return dict(zip(("x", *self.parameters), found, strict=True))

    def outputs(self, stream: Tensor) -> dict[str, Tensor]:
        return {"y": stream, "normed": rmsnorm(stream, self.next_norm)}


class Plain(Differentiated):
    """Wrap the function ``layer`` as a ``Layer`` in eager PyTorch. ``compiled``: an optional transformation
    of the function, such as torch.compile in some mode."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        next_norm: Tensor,
        compiled: Callable[[Function], Function] | None = None,
    ):
        super().__init__(shape, weights._asdict(), next_norm)
        self._weights = Weights(**self.parameters)
        self._layer: Function = compiled(layer) if compiled else layer

    def call(self, x: Tensor) -> Tensor:
        return self._layer(self.shape, x, self._weights, self.turn)
