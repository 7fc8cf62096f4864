"""The layer as the package ``fused`` computes it under torch.compile: the forward and the derived backward.

The input stream contains the layer's first norm, computed without the row scaling. The output stream contains
the next layer's first norm in the same form (see ``fused.huggingface.stack``). The weights are packed once,
before timing, although ``fused`` by default packs weights in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coda_agent.comparison.layers.layer import Gradients, Layer
from coda_agent.comparison.layers.shape import EPS, Shape, Weights, rotary
from coda_agent.fused import ahead, functional
from coda_agent.fused.chains import Begun, begun


class BegunStream(NamedTuple):
    """The residual stream [tokens, D]. ``begun``: the next norm of this stream, without the row scaling."""

    h: Tensor
    begun: Begun | None


def layer(
    shape: Shape, stream: BegunStream, weights: Weights, next_norm: Tensor, table: Tensor
) -> BegunStream:
    """Compute the pre-norm layer from packed weights."""
    norm, following = (functional.Norm(w, EPS) for w in (weights.attention_norm, next_norm))
    qkv = functional.before_attention(
        stream.h, norm, weights.qkv, None, table, sum(shape.projections[:2]), stream.begun
    )
    q, k, v = (shape.apart(t) for t in qkv.split(shape.projections, 1))
    mixed = shape.together(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups > 0))
    norm = functional.Norm(weights.ffn_norm, EPS)
    return BegunStream(
        *functional.after_attention_with_next_norm(
            mixed, stream.h, norm, weights.out, weights.gate_up, weights.down, "swiglu", following
        )
    )


Function = Callable[[Shape, BegunStream, Weights, Tensor, Tensor], BegunStream]


class Fused(Layer[BegunStream, tuple[Tensor, Tensor]]):
    """Wrap the function ``layer`` as a ``Layer``. The arguments ``weights`` and ``next_norm`` have the plain
    layer's layout. ``compiled``: an optional transformation of the function, such as torch.compile."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        next_norm: Tensor,
        compiled: Callable[[Function], Function] | None = None,
    ) -> None:
        self.shape, self.next_norm = shape, next_norm
        own = packed(shape, weights)._asdict()
        self.weights = Weights(**{name: t.detach().requires_grad_() for name, t in own.items()})
        turn = rotary(shape, next_norm.device)
        rows = torch.Size((shape.sequences, shape.length))
        self.table = functional.angles(*turn, rows).type_as(next_norm)
        self._layer = compiled(layer) if compiled else layer

    def start(self, x: Tensor) -> BegunStream:
        return BegunStream(x, begun(x, self.weights.attention_norm, EPS, x.dtype))

    def forward(self, stream: BegunStream) -> BegunStream:
        with torch.no_grad():
            return self._layer(self.shape, stream, self.weights, self.next_norm, self.table)

    def train(self, stream: BegunStream) -> tuple[BegunStream, tuple[Tensor, Tensor]]:
        x = stream.h.detach().requires_grad_()
        y, following = self._layer(
            self.shape, BegunStream(x, stream.begun), self.weights, self.next_norm, self.table
        )
        return BegunStream(y.detach(), following), (x, y)

    def backward(self, saved: tuple[Tensor, Tensor], dout: Tensor) -> Gradients:
        x, y = saved
        found = torch.autograd.grad(y, (x, *self.weights), dout)
        return dict(zip(("x", *Weights._fields), found, strict=True))

    def outputs(self, stream: BegunStream) -> dict[str, Tensor]:
        assert stream.begun  # the comparison runs in bf16
        hg, rstd = stream.begun
        return {"y": stream.h, "normed": (hg * rstd[:, None]).type_as(hg)}

    def arranged(self) -> tuple[Tensor, ...]:
        return self.weights.qkv, self.weights.gate_up, self.table

    def gradients(self, found: Mapping[str, Tensor]) -> Gradients:
        weights = unpacked(self.shape, Weights(*(found[name] for name in Weights._fields)))
        return {"x": found["x"], **weights._asdict()}


def packed(shape: Shape, weights: Weights) -> Weights:
    """Reorder the plain layer's weights so that the two rows of each pair are adjacent. A pair is two rows
    that are rotated together, or a gate row and its up row."""
    q, k, v = weights.qkv.split(shape.projections)
    qkv = torch.cat((*(functional.rotary_pairs(t, shape.head_width) for t in (q, k)), v))
    return weights._replace(qkv=qkv, gate_up=functional.paired(*weights.gate_up.chunk(2)))


def unpacked(shape: Shape, weights: Weights) -> Weights:
    """Convert gradients of packed weights back to the plain layer's layout."""
    q, k, v = weights.qkv.split(shape.projections)
    heads = (t.mT.unflatten(1, (-1, shape.head_width)) for t in (q, k))
    qkv = torch.cat((*(functional.rotary_halves(t).flatten(1).mT for t in heads), v))
    return weights._replace(qkv=qkv, gate_up=torch.cat((weights.gate_up[0::2], weights.gate_up[1::2])))


def programs(shape: Shape, *, backward: bool) -> list[ahead.Bound]:
    """The programs that the layer runs, with their sizes. To find them, this function calls the layer on the
    meta device, where nothing is computed."""
    width, ffn = shape.width, shape.ffn
    empty: Any = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    weights = Weights(
        attention_norm=empty(width),
        qkv=empty(sum(shape.projections), width),
        out=empty(width, width),
        ffn_norm=empty(width),
        gate_up=empty(2 * ffn, width),
        down=empty(width, ffn),
    )
    own = Fused(shape, weights, empty(width))
    stream, dout = own.start(empty(shape.tokens, width)), empty(shape.tokens, width)
    return ahead.called(partial(own.step, stream, dout) if backward else partial(own.forward, stream))
