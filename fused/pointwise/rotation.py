"""Rotate attention's gradients back in one pass, into the gradient of packed queries, keys and values.

Attention returns the gradients of q, k and v in its own layout. One Triton kernel reads them in place,
rotates the gradients of q and k back, and scales rows. The kernel also sums dz * z over each row, where z is
the projection's result and dz is the gradient of z. The backward of the norm before the projection needs
these sums. For the same work, Inductor generates two kernels, and Inductor's rotation reaches only a fifth of
an H100's memory bandwidth. So torch.compile also calls the Triton kernel, as an operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_agent.fused.pointwise.programs import runs_on_gpu

Three = tuple[Tensor, Tensor, Tensor]


def rotated_back(gradients: Three, values: Three, cos_sin: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return dz * rstd [tokens, (H + 2 G) W], and the row sums of dz * z, [tokens] in fp32. Here z is q, k
    and v side by side, before the rotation, and dz is the gradient of z.

    ``gradients``: attention's gradients of q [sequences, H, length, W], k and v [sequences, G, length, W].
    ``values``: the rotated q, the rotated k, and v, each [tokens, heads * W] with rows of any stride.
    ``cos_sin``: [tokens, W], cosines and sines interleaved. ``rstd``: [tokens]. On a GPU a Triton kernel
    computes the results, and elsewhere PyTorch.
    """
    traced = rstd.is_cuda and not runs_on_gpu(rstd)
    return (_operator if traced else _computed)(gradients, values, cos_sin, rstd)


def _computed(
    gradients: Sequence[Tensor], values: Sequence[Tensor], cos_sin: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    if not rstd.is_cuda:
        return plainly(gradients, values, cos_sin, rstd)
    from coda_agent.fused.pointwise import rotation_kernels  # imports Triton

    return rotation_kernels.in_one_pass(gradients, values, cos_sin, rstd)


_operator = torch.library.custom_op(
    "coda_agent::rotated_back",
    _computed,
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor[] values, Tensor cos_sin, Tensor rstd) -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(
    gradients: Sequence[Tensor], values: Sequence[Tensor], cos_sin: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    columns = sum(t.shape[1] * t.shape[3] for t in gradients)
    return gradients[0].new_empty(rstd.shape[0], columns), torch.empty_like(rstd, dtype=torch.float32)


def of_a_chain(known: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Tensor, Tensor] | None:
    """Compute the pointwise part of the backward of the chain ``attention_in`` with rotation. Return dz *
    rstd, and a factor for each row. The row of the norm's input, times this factor, is one term of the
    gradient of this input. The incoming gradient ``d_qkv`` is one matrix, or three matrices for q, k and v.
    Return None if q, k and v do not consist of whole heads, or if k and v differ in width."""
    d, z, rstd, table = (known[name] for name in ("d_qkv", "qkv", "rstd_in", "cos_sin"))
    width, turned = table.shape[1], int(known["turned"])
    rest = z.shape[1] - turned
    if rest <= 0 or turned <= rest or turned % width or rest % width:
        return None
    parts = (turned - rest, rest, rest)
    apart = d.split(parts, 1) if isinstance(d, Tensor) else d
    if tuple(t.shape[1] for t in apart) != parts:
        return None
    gradients = (t.unflatten(1, (-1, width)).transpose(0, 1)[None] for t in apart)
    made, sums = rotated_back(tuple(gradients), z.split(parts, 1), table, rstd)
    return made, sums * rstd.square() / -sizes["D"]


def plainly(
    gradients: Sequence[Tensor], values: Sequence[Tensor], cos_sin: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """``rotated_back`` in PyTorch."""
    dq, dk, dv = (t.transpose(1, 2).flatten(2).flatten(0, 1).float() for t in gradients)
    cosine, sine = (t[:, None] for t in cos_sin.float().unflatten(1, (-1, 2)).unbind(-1))

    def back(t: Tensor) -> Tensor:
        even, odd = t.unflatten(1, (-1, cosine.shape[-1], 2)).unbind(-1)
        return torch.stack((even * cosine + odd * sine, odd * cosine - even * sine), -1).flatten(1)

    sums = [(d * z.float()).sum(-1) for d, z in zip((dq, dk, dv), values, strict=True)]
    whole = torch.cat((back(dq), back(dk), dv), 1) * rstd[:, None]
    return whole.type_as(gradients[0]), sums[0] + sums[1] + sums[2]
