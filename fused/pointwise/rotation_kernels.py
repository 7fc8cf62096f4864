"""The Triton kernel of ``fused.pointwise.rotation``."""

from __future__ import annotations

from collections.abc import Sequence
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


def in_one_pass(
    gradients: Sequence[Tensor], values: Sequence[Tensor], cos_sin: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """``rotation.rotated_back`` in one Triton kernel, with one program per row."""
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
