"""The layer with Liger's operators (liger-kernel 0.8.5) for norms, rotation and SwiGLU. cuBLAS computes the
matmuls.

One of Liger's operators adds the residual and applies the FFN's norm. Another operator applies SwiGLU to one
tensor that holds gate and up. The rotation works in place on contiguous heads, so it must copy the q and k of
a joint projection. Separate projections (``apart``) need no copy, but they need three matmuls, and the
backward must add the three gradients of their input. The benchmark times the layer with a joint projection
and with separate projections.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from coda_agent.comparison.layers.layer import Gradients
from coda_agent.comparison.layers.plain import Differentiated
from coda_agent.comparison.layers.shape import EPS, Shape, Weights

APART = ("q", "k", "v")


class Liger(Differentiated):
    """The layer with Liger's operators. ``apart``: q, k and v have separate weights, as in Hugging Face's
    models. Raises ImportError if Liger is not installed."""

    def __init__(self, shape: Shape, weights: Weights, next_norm: Tensor, apart: bool = False):
        parameters = weights._asdict()
        if apart:
            parameters |= dict(zip(APART, parameters.pop("qkv").split(shape.projections), strict=True))
        super().__init__(shape, parameters, next_norm)
        self._operators: Any = importlib.import_module("liger_kernel.ops")

    def call(self, x: Tensor) -> Tensor:
        shape, given, operators = self.shape, self.parameters, self._operators
        normed = operators.LigerRMSNormFunction.apply(x, given["attention_norm"], EPS)
        cosine, sine = (t[None] for t in self.turn)
        q, k, v = self._projected(normed)
        q, k = operators.LigerRopeFunction.apply(q, k, cosine, sine)
        mixed = shape.together(
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups > 0)
        )
        normed, h = operators.LigerFusedAddRMSNormFunction.apply(
            linear(mixed, given["out"]), x, given["ffn_norm"], EPS
        )
        act = operators.LigerFusedGateUpSiLUMulFunction.apply(linear(normed, given["gate_up"]))
        return h + linear(act, given["down"])

    def _projected(self, normed: Tensor) -> list[Tensor]:
        if "qkv" not in self.parameters:
            return [self.shape.apart(linear(normed, self.parameters[name])) for name in APART]
        qkv = linear(normed, self.parameters["qkv"])
        return [self.shape.apart(t) for t in qkv.split(self.shape.projections, 1)]

    def gradients(self, found: Mapping[str, Tensor]) -> Gradients:
        if "qkv" in found:
            return dict(found)
        rest = {name: t for name, t in found.items() if name not in APART}
        return rest | {"qkv": torch.cat([found[name] for name in APART])}
