"""The layer with QuACK's functions (quack-kernels 0.6.5) for the norms, the linear layers, the rotation and
the MLP. QuACK's own modules call the same functions. PyTorch computes the last addition, and attention, which
QuACK does not have.

QuACK tunes its GEMMs during the first calls. One call of QuACK rotates q and k together, and writes them to a
new tensor. QuACK could also rotate in place. But PyTorch refuses to change the joint projection in place,
because QuACK's linear layer returns the projection as a view.
"""

from __future__ import annotations

from quack.linear import linear_func
from quack.mlp import mlp_func
from quack.rmsnorm import rmsnorm
from quack.rotary import apply_rotary_emb
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from coda_agent.comparison.layers.plain import Differentiated
from coda_agent.comparison.layers.shape import EPS, Shape, Weights


class Quack(Differentiated):
    """The layer with QuACK's functions. Its weights have the plain layer's layout."""

    def __init__(self, shape: Shape, weights: Weights, next_norm: Tensor):
        super().__init__(shape, weights._asdict(), next_norm)
        self._pairs = tuple(t[:, : shape.pairs].contiguous() for t in self.turn)

    def call(self, x: Tensor) -> Tensor:
        shape, given = self.shape, self.parameters
        qkv = linear_func(rmsnorm(x, given["attention_norm"], eps=EPS), given["qkv"])
        heads = qkv.view(shape.sequences, shape.length, -1, shape.head_width)
        groups = shape.groups or shape.heads
        both, v = heads.split((shape.heads + groups, groups), 2)
        q, k = apply_rotary_emb(both, *self._pairs).split((shape.heads, groups), 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = shape.together(
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups > 0)
        )
        out = linear_func(mixed, given["out"])
        normed, h = rmsnorm(out, given["ffn_norm"], residual=x, eps=EPS, prenorm=True)
        return h + mlp_func(normed, given["gate_up"], given["down"], "swiglu", concat_layout=True)
