"""Triton kernels that norm and rotate the heads of packed queries, keys and values, forward and backward.

A rotated pair is (a, b), half a head apart. The two halves of a head are loaded separately, so that a pair
needs no exchange between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8  # heads at a time
PROGRAMS = 1056  # of the backward, 8 per SM; each sums the gradients of the norms' weights over its tokens


@triton.jit  # type: ignore[untyped-decorator]
def _halves(start, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the halves of a vector of one head's width, in fp32."""
    column = tl.arange(0, HALF)
    return tl.load(start + column).to(tl.float32), tl.load(start + HALF + column).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _places(start, heads, first, stride, HALF: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of the first halves of some heads, and which of these heads exist."""
    head = first + tl.arange(0, BLOCK)
    return start + head[:, None] * stride + tl.arange(0, HALF)[None, :], (head < heads)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _load(start, heads, first, stride, HALF: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the halves of some heads, in fp32."""
    at, there = _places(start, heads, first, stride, HALF, BLOCK)
    return tl.load(at, there, 0).to(tl.float32), tl.load(at + HALF, there, 0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _store(start, heads, first, a, b, HALF: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the halves of some adjacent heads."""
    at, there = _places(start, heads, first, 2 * HALF, HALF, BLOCK)
    tl.store(at, a.to(start.dtype.element_ty), there)
    tl.store(at + HALF, b.to(start.dtype.element_ty), there)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(a, b, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide the halves of heads by their RMS; also return its reciprocal."""
    rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    return a * rstd, b * rstd, rstd


@triton.jit  # type: ignore[untyped-decorator]
def _forward_heads(  # type: ignore[no-untyped-def]
    z, out, gamma, cos, sin, heads, eps, HALF: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr
):
    """Norm and rotate some heads of one token."""
    cos_a, cos_b = _halves(cos, HALF)
    sin_a, sin_b = _halves(sin, HALF)
    if NORMED:
        gamma_a, gamma_b = _halves(gamma, HALF)
    for first in range(0, heads, BLOCK):
        a, b = _load(z, heads, first, 2 * HALF, HALF, BLOCK)
        if NORMED:
            a, b, _ = _normed(a, b, eps, HALF)
            a, b = a * gamma_a, b * gamma_b
        _store(out, heads, first, a * cos_a - b * sin_a, b * cos_b + a * sin_b, HALF, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    z,
    q,
    k,
    q_gamma,
    k_gamma,
    cos,
    sin,
    period,
    heads,
    groups,
    eps,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, width = tl.program_id(0).to(tl.int64), 2 * HALF
    z += token * (heads + 2 * groups) * width
    cos += token % period * width
    sin += token % period * width
    q += token * heads * width
    k += token * groups * width
    _forward_heads(z, q, q_gamma, cos, sin, heads, eps, HALF, NORMED, BLOCK)
    _forward_heads(z + heads * width, k, k_gamma, cos, sin, groups, eps, HALF, NORMED, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_heads(  # type: ignore[no-untyped-def]
    d,
    stride,
    z,
    out,
    gamma,
    cos,
    sin,
    heads,
    eps,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of some heads of one token. Return the gradients of both halves of the norm's
    weight, and the sum of the heads' values times their gradients; without a norm, zeros."""
    cos_a, cos_b = _halves(cos, HALF)
    sin_a, sin_b = _halves(sin, HALF)
    total_a = tl.zeros((HALF,), tl.float32)
    total_b = tl.zeros((HALF,), tl.float32)
    total = 0.0
    if NORMED:
        gamma_a, gamma_b = _halves(gamma, HALF)
    for first in range(0, heads, BLOCK):
        turned_a, turned_b = _load(d, heads, first, stride, HALF, BLOCK)
        da = turned_a * cos_a + turned_b * sin_b
        db = turned_b * cos_b - turned_a * sin_a
        if NORMED:
            a, b = _load(z, heads, first, 2 * HALF, HALF, BLOCK)
            a, b, rstd = _normed(a, b, eps, HALF)
            total_a += tl.sum(da * a, 0)
            total_b += tl.sum(db * b, 0)
            da, db = da * gamma_a, db * gamma_b
            mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
            da, db = (da - a * mean) * rstd, (db - b * mean) * rstd
            total += tl.sum((da * a + db * b) / rstd)
        _store(out, heads, first, da, db, HALF, BLOCK)
    return total_a, total_b, total


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    z,
    out,
    q_gamma,
    k_gamma,
    d_gamma,
    sums,
    cos,
    sin,
    tokens,
    length,
    period,
    heads,
    groups,
    eps,
    dq_sequence,
    dq_head,
    dq_row,
    dk_sequence,
    dk_head,
    dk_row,
    dv_sequence,
    dv_head,
    dv_row,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    width, column = 2 * HALF, tl.arange(0, HALF)
    q_a = tl.zeros((HALF,), tl.float32)
    q_b = tl.zeros((HALF,), tl.float32)
    k_a = tl.zeros((HALF,), tl.float32)
    k_b = tl.zeros((HALF,), tl.float32)
    first_token, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in range(0, tl.cdiv(tokens - tl.program_id(0), programs)):
        token = first_token + turn * programs
        sequence, at = token // length, token % length
        start = token * (heads + 2 * groups) * width
        c, s = cos + token % period * width, sin + token % period * width
        more_a, more_b, total = _backward_heads(
            *(dq + sequence * dq_sequence + at * dq_row, dq_head, z + start, out + start, q_gamma),
            *(c, s, heads, eps, HALF, NORMED, BLOCK),
        )
        q_a += more_a
        q_b += more_b
        start += heads * width
        more_a, more_b, more = _backward_heads(
            *(dk + sequence * dk_sequence + at * dk_row, dk_head, z + start, out + start, k_gamma),
            *(c, s, groups, eps, HALF, NORMED, BLOCK),
        )
        k_a += more_a
        k_b += more_b
        total += more
        start += groups * width
        for first in range(0, groups, BLOCK):
            own = dv + sequence * dv_sequence + at * dv_row
            a, b = _load(own, groups, first, dv_head, HALF, BLOCK)
            _store(out + start, groups, first, a, b, HALF, BLOCK)
            if NORMED:
                value_a, value_b = _load(z + start, groups, first, 2 * HALF, HALF, BLOCK)
                total += tl.sum(a * value_a + b * value_b)
        if NORMED:
            tl.store(sums + token, total)
    if NORMED:
        d_gamma += tl.program_id(0) * 4 * HALF
        tl.store(d_gamma + column, q_a)
        tl.store(d_gamma + HALF + column, q_b)
        tl.store(d_gamma + 2 * HALF + column, k_a)
        tl.store(d_gamma + 3 * HALF + column, k_b)


def forward(
    packed: Tensor, cos: Tensor, sin: Tensor, groups: int, gammas: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``heads.heads`` of contiguous tensors."""
    sequences, length, columns = packed.shape
    width = cos.shape[-1]
    count = columns // width - 2 * groups
    q, k = (packed.new_empty(sequences, length, each, width) for each in (count, groups))
    launch: Any = _forward[sequences * length,]
    normed = gammas[0] is not None
    read = [packed if gamma is None else gamma for gamma in gammas]
    period = cos.numel() // width
    launch(
        *(packed, q, k, *read, cos, sin, period, count, groups, eps),
        HALF=width // 2,
        NORMED=normed,
        BLOCK=BLOCK,
    )
    v = packed[..., -groups * width :].unflatten(-1, (groups, width))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def backward(
    gradients: Sequence[Tensor],
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    groups: int,
    gammas: Sequence[Tensor | None],
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of ``packed`` and of the norms' weights, and the sum of each token's values of ``packed``
    times their gradients, [tokens] in fp32. Without norms, all but the first are None."""
    d = [t if t.stride(-1) == 1 else t.contiguous() for t in gradients]
    sequences, length, columns = packed.shape
    width, tokens = cos.shape[-1], sequences * length
    normed, programs = gammas[0] is not None, min(PROGRAMS, tokens)
    read = [packed if gamma is None else gamma for gamma in gammas]
    out, d_gamma = torch.empty_like(packed), cos.new_empty(programs, 2, width, dtype=torch.float32)
    sums = cos.new_empty(tokens if normed else 0, dtype=torch.float32)
    launch: Any = _backward[programs,]
    launch(
        *(*d, packed, out, *read, d_gamma, sums, cos, sin, tokens, length, cos.numel() // width),
        *(columns // width - 2 * groups, groups, eps),
        *(t.stride(axis) for t in d for axis in range(3)),
        HALF=width // 2,
        NORMED=normed,
        BLOCK=BLOCK,
    )
    if not normed:
        return out, None, None, None
    q, k = (t.type_as(gamma) for t, gamma in zip(d_gamma.sum(0), gammas, strict=True) if gamma is not None)
    return out, q, k, sums
