"""Normalize and rotate the heads of packed queries, keys and values.

On a GPU, Triton kernels make one pass forward and one pass backward. The forward saves only its inputs for
the backward. In PyTorch, each step would be a separate pass, with intermediate tensors in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coda_agent.fused.ops import check_backward
from coda_agent.fused.pointwise.programs import runs_on_gpu

Three = tuple[Tensor, Tensor, Tensor]
_ATTRIBUTE = "_coda_agent_row_sums"


class RowSums(NamedTuple):
    """Sums that are attached, as an attribute, to the gradient of a projection's result. The backward of the
    norm before the projection needs these sums. ``sums`` [tokens]: for each row, the sum of the result times
    its gradient. ``changes``: how often the gradient had been changed in place when the sums were
    computed."""

    sums: Tensor
    changes: int


def of_a_chain(known: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Tensor, Tensor] | None:
    """Compute the pointwise part of the backward of the chain ``attention_in``. Return the gradient of the
    chain's result, and a factor for each row. The row of the norm's input, times this factor, is one term of
    the gradient of this input. Return None if the gradient of the chain's result has no ``RowSums``, or if it
    was changed after the sums were computed."""
    d, rstd = known["d_qkv"], known["rstd_in"]
    found: RowSums | None = getattr(d, _ATTRIBUTE, None)
    if found is None or found.changes != d._version:
        return None
    return d, found.sums * rstd.square() / -sizes["D"]


def heads(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Three:
    """Split ``packed`` [sequences * length, (H + 2 * groups) * width] into queries [sequences, H, length,
    width], and keys and values [sequences, groups, length, width]. Apply RMSNorm to each head of queries and
    keys, then rotate this head. Values stay as they are.

    ``norms``: the weights [width] of the norms of queries and keys, or None for no norms. ``cos`` and
    ``sin``: [sequences or 1, length, width]. The two columns of a rotated pair are half a head apart.
    Everything is computed in fp32 and rounded once.
    """
    width = cos.shape[-1]
    if runs_on_gpu(packed) and width > 1 and width.bit_count() == 1:
        return _InOnePass.apply(packed, cos, sin, groups, *(norms or (None, None)), eps)
    return plainly(packed, cos, sin, groups, norms, eps)


def plainly(
    packed: Tensor, cos: Tensor, sin: Tensor, groups: int, norms: tuple[Tensor, Tensor] | None, eps: float
) -> Three:
    """``heads`` in PyTorch."""
    z = packed.unflatten(1, (-1, cos.shape[2])).unflatten(0, (-1, cos.shape[1])).transpose(1, 2)
    q, k, v = z.split((z.shape[1] - 2 * groups, groups, groups), 1)
    c, s = (t[:, None].float() for t in (cos, sin))

    def turned(t: Tensor, gamma: Tensor | None) -> Tensor:
        y = t.float()
        if gamma is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gamma.float()
        first, second = y.chunk(2, -1)
        return (y * c + torch.cat((-second, first), -1) * s).type_as(packed)

    q_gamma, k_gamma = norms or (None, None)
    return turned(q, q_gamma), turned(k, k_gamma), v


class _InOnePass(torch.autograd.Function):
    """``heads`` in one Triton kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, groups: int, *norms: Any) -> Three:
        from coda_agent.fused.pointwise import head_kernels

        *gammas, eps = norms
        packed, cos, sin = (t.contiguous() for t in (packed.unflatten(0, (-1, cos.shape[1])), cos, sin))
        ctx.save_for_backward(packed, cos, sin, *gammas)
        ctx.groups, ctx.eps = groups, eps
        return head_kernels.forward(packed, cos, sin, groups, gammas, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        from coda_agent.fused.pointwise import head_kernels

        check_backward(*gradients)

        packed, cos, sin, *gammas = ctx.saved_tensors
        d, *d_gammas, sums = head_kernels.backward(gradients, packed, cos, sin, ctx.groups, gammas, ctx.eps)
        d = d.flatten(0, 1)
        if sums is not None:
            setattr(d, _ATTRIBUTE, RowSums(sums, d._version))
        return d, None, None, None, *d_gammas, None
