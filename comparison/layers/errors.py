"""Compute the error of a layer variant: the distance of the variant's results from those of the plain layer
in fp32. The variant and the plain layer get the same bf16 numbers as inputs and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coda_agent.comparison.layers.layer import Layer
from coda_agent.comparison.layers.plain import Plain
from coda_agent.comparison.layers.shape import Drawn, Shape, Weights


def results(layer: Layer[Any, Any], drawn: Drawn, *, backward: bool = True) -> dict[str, Tensor]:
    """Every output of one layer by name ("y", "normed") and, with ``backward``, every gradient ("d x", "d
    qkv", ...). Without ``backward`` the layer runs for inference, so that no variant compiles code for a
    backward."""
    if not backward:
        return layer.outputs(layer.forward(layer.start(drawn.x)))
    y, saved = layer.train(layer.start(drawn.x))
    gradients = layer.gradients(layer.backward(saved, drawn.dout))
    return layer.outputs(y) | {f"d {name}": t for name, t in gradients.items()}


def truth(shape: Shape, drawn: Drawn, *, backward: bool = True) -> dict[str, Tensor]:
    """``results`` of the plain layer in fp32. Raises RuntimeError if PyTorch may use TF32 in matmuls."""
    if torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError("the truth needs torch.set_float32_matmul_precision('highest')")
    weights = Weights(*(w.float() for w in drawn.weights))
    wide = Drawn(weights, drawn.next_norm.float(), drawn.x.float(), drawn.dout.float())
    return results(Plain(shape, weights, wide.next_norm), wide, backward=backward)


def relative(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor in ``found``, the RMS of its error, divided by the RMS of the exact values. The ratio
    is NaN or infinite if the tensor contains NaN or infinity. Raises ValueError if names or shapes differ."""
    shapes = {name: tuple(t.shape) for name, t in found.items()}
    wanted = {name: tuple(t.shape) for name, t in exact.items()}
    if shapes != wanted:
        raise ValueError(f"the results have shapes {shapes}, the exact values {wanted}")
    return {name: _relative(found[name], t) for name, t in exact.items()}


def _relative(found: Tensor, exact: Tensor) -> float:
    wide = exact.float()
    return float((found.float() - wide).norm() / wide.norm())
