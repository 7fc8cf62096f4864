"""Put weights in the order that kernels need.

A kernel may read one matrix that joins the rows of several weights. Autograd's gradient of each weight would
then be a strided view of the matrix's gradient. PyTorch would copy this view for the optimizer at less than
half of an H100's memory bandwidth. So on a GPU, code compiled by torch.compile makes the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_agent.fused.pointwise.programs import fused_on_gpu, runs_on_gpu


def paired(first: Tensor, second: Tensor) -> Tensor:
    """Interleave the rows of two matrices [N, D]; the result is [2*N, D]."""
    if runs_on_gpu(first):
        return _Reordered.apply(_interleaved, _parted, first, second)
    return _interleaved(first, second)


def packed(q: Tensor, k: Tensor, v: Tensor, width: int = 0) -> Tensor:
    """Join the weights of queries, keys and values into one matrix, by rows. ``width``: the head width if
    queries and keys are rotated, otherwise 0. If they are rotated, the two rows of each rotated pair become
    adjacent."""
    if not width:
        return torch.cat((q, k, v))
    if not runs_on_gpu(q):
        return _joined((q, k, v), width)
    sizes = [len(t) for t in (q, k, v)]
    return _Reordered.apply(lambda *parts: _joined(parts, width), lambda d: _split(d, sizes, width), q, k, v)


def rotary_pairs(weight: Tensor, width: int) -> Tensor:
    """Reorder rows [heads * width, D]. The two rows of each rotated pair, which are half a head apart, become
    adjacent."""
    return weight.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), 1).flatten(0, 1)


@fused_on_gpu
def _parted(rows: Tensor) -> list[Tensor]:
    return [t.contiguous() for t in rows.unflatten(0, (-1, 2)).unbind(1)]


@fused_on_gpu
def _joined(parts: Sequence[Tensor], width: int) -> Tensor:
    q, k, v = parts
    return torch.cat((rotary_pairs(q, width), rotary_pairs(k, width), v))


@fused_on_gpu
def _split(rows: Tensor, sizes: Sequence[int], width: int) -> list[Tensor]:
    q, k, v = rows.split(sizes)
    return [*(t.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2) for t in (q, k)), v]


class _Reordered(torch.autograd.Function):
    """Forward: join parts in one matrix. Backward: split the matrix's gradient into the parts' gradients."""

    @staticmethod
    def forward(
        ctx: Any, there: Callable[..., Tensor], back: Callable[[Tensor], list[Tensor]], *parts: Tensor
    ) -> Tensor:
        ctx.back = back
        return there(*parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.back(gradient)
