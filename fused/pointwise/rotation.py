"""Rotate attention's gradients back in one pass, into the gradient of packed queries, keys and values.

Attention returns the gradients of q, k and v in its own layout. One Triton kernel reads them in place,
rotates the gradients of q and k back, and scales rows. The kernel also sums dz * z over each row, where z is
the projection's result and dz is the gradient of z. The backward of the norm before the projection needs
these sums. For the same work, Inductor generates two kernels, and Inductor's rotation reaches only a fifth of
an H100's memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns at a time


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    gradient,
    value,
    table,
    out,
    scale,
    heads,
    stride_head,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate back and scale one row of the gradient of q, k or v. Return the sum over this row of
    ``gradient`` times ``value``."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, heads * WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < heads * WIDTH
        place = (column // WIDTH) * stride_head + column % WIDTH
        d = tl.load(gradient + place, inside, 0).to(tl.float32)
        z = tl.load(value + column, inside, 0).to(tl.float32)
        total += d * z
        if ROTATED:
            even, odd = tl.split(tl.reshape(d, (BLOCK // 2, 2)))
            turn = tl.load(table + column % WIDTH).to(tl.float32)
            cosine, sine = tl.split(tl.reshape(turn, (BLOCK // 2, 2)))
            back = tl.join(even * cosine + odd * sine, odd * cosine - even * sine)
            d = tl.reshape(back, (BLOCK,))
        tl.store(out + column, (d * scale).to(out.dtype.element_ty), inside)
    return tl.sum(total)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    q,
    k,
    v,
    table,
    rstd,
    out,
    sums,
    length,
    q_heads,
    kv_heads,
    dq_sequence,
    dq_row,
    dq_head,
    dk_sequence,
    dk_row,
    dk_head,
    dv_sequence,
    dv_row,
    dv_head,
    q_row,
    k_row,
    v_row,
    table_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence, at = row // length, row % length
    scale = tl.load(rstd + row)
    turn = table + row * table_row
    out += row * (q_heads + 2 * kv_heads) * WIDTH
    dq += sequence * dq_sequence + at * dq_row
    dk += sequence * dk_sequence + at * dk_row
    dv += sequence * dv_sequence + at * dv_row
    total = _part(dq, q + row * q_row, turn, out, scale, q_heads, dq_head, WIDTH, True, BLOCK)
    out += q_heads * WIDTH
    total += _part(dk, k + row * k_row, turn, out, scale, kv_heads, dk_head, WIDTH, True, BLOCK)
    out += kv_heads * WIDTH
    total += _part(dv, v + row * v_row, turn, out, scale, kv_heads, dv_head, WIDTH, False, BLOCK)
    tl.store(sums + row, total)


Three = tuple[Tensor, Tensor, Tensor]


def rotated_back(gradients: Three, values: Three, cos_sin: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return dz * rstd [tokens, (H + 2 G) W], and the row sums of dz * z, [tokens] in fp32. Here z is q, k
    and v side by side, before the rotation, and dz is the gradient of z.

    ``gradients``: attention's gradients of q [sequences, H, length, W], k and v [sequences, G, length, W].
    ``values``: the rotated q, the rotated k, and v, each [tokens, heads * W] with rows of any stride.
    ``cos_sin``: [tokens, W], cosines and sines interleaved. ``rstd``: [tokens]. On a GPU a Triton kernel
    computes the results, and elsewhere PyTorch.
    """
    return (in_one_pass if rstd.is_cuda else plainly)(gradients, values, cos_sin, rstd)


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


def in_one_pass(gradients: Three, values: Three, cos_sin: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """``rotated_back`` in one Triton kernel, with one program per row."""
    dq, dk, dv = (t if t.stride(3) == 1 else t.contiguous() for t in gradients)
    sequences, heads, length, width = dq.shape
    groups = dk.shape[1]
    out = dq.new_empty(sequences * length, (heads + 2 * groups) * width)
    sums = torch.empty_like(rstd, dtype=torch.float32)
    strides = [t.stride(axis) for t in (dq, dk, dv) for axis in (0, 2, 1)]
    rows = [t.stride(0) for t in (*values, cos_sin)]
    launch: Any = _rows[len(out),]
    launch(
        *(dq, dk, dv, *values, cos_sin, rstd, out, sums, length, heads, groups, *strides, *rows),
        WIDTH=width,
        BLOCK=min(BLOCK, triton.next_power_of_2(heads * width)),
    )
    return out, sums


def plainly(gradients: Three, values: Three, cos_sin: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """``rotated_back`` in PyTorch."""
    dq, dk, dv = (t.transpose(1, 2).flatten(2).flatten(0, 1).float() for t in gradients)
    cosine, sine = (t[:, None] for t in cos_sin.float().unflatten(1, (-1, 2)).unbind(-1))

    def back(t: Tensor) -> Tensor:
        even, odd = t.unflatten(1, (-1, cosine.shape[-1], 2)).unbind(-1)
        return torch.stack((even * cosine + odd * sine, odd * cosine - even * sine), -1).flatten(1)

    sums = [(d * z.float()).sum(-1) for d, z in zip((dq, dk, dv), values, strict=True)]
    whole = torch.cat((back(dq), back(dk), dv), 1) * rstd[:, None]
    return whole.type_as(gradients[0]), sums[0] + sums[1] + sums[2]
