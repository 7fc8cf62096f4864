"""Triton kernels that normalize and rotate the heads of packed queries, keys and values, forward and
backward.

The two values of a rotated pair, a and b, are half a head apart. The two halves of a head are loaded
separately, so that one thread holds both values of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8  # heads that a Triton program loads at a time
# Triton programs of the backward, 8 per SM. Each program sums the gradients of norms' weights over its
# tokens.
PROGRAMS = 1056


@triton.jit  # type: ignore[untyped-decorator]
def _halves(start, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a vector as wide as one head, as two halves in fp32."""
    column = tl.arange(0, HALF)
    return tl.load(start + column).to(tl.float32), tl.load(start + HALF + column).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _places(start, heads, first, stride, HALF: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of the first halves of BLOCK heads, and a mask that says which of these heads exist."""
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
    """Divide each head by its RMS. ``a`` and ``b``: the halves of the heads. Return the divided halves, and
    the reciprocal RMS."""
    rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    return a * rstd, b * rstd, rstd


@triton.jit  # type: ignore[untyped-decorator]
def _forward_heads(  # type: ignore[no-untyped-def]
    z, out, gamma, cos, sin, heads, eps, HALF: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalize and rotate some heads of one token."""
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
    head_stride,
    z,
    out,
    gamma,
    cos,
    sin,
    heads,
    eps,
    sums,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of some heads of one token. With a norm, add to the three ``sums`` [BLOCK, HALF].
    The first two are the gradients of the halves of the norm's weight. The third is the sum of the heads'
    values times their gradients."""
    gamma_a_sum, gamma_b_sum, products = sums
    cos_a, cos_b = _halves(cos, HALF)
    sin_a, sin_b = _halves(sin, HALF)
    if NORMED:
        gamma_a, gamma_b = _halves(gamma, HALF)
    for first in range(0, heads, BLOCK):
        turned_a, turned_b = _load(d, heads, first, head_stride, HALF, BLOCK)
        da = turned_a * cos_a + turned_b * sin_b
        db = turned_b * cos_b - turned_a * sin_a
        if NORMED:
            a, b = _load(z, heads, first, 2 * HALF, HALF, BLOCK)
            a, b, rstd = _normed(a, b, eps, HALF)
            gamma_a_sum += da * a
            gamma_b_sum += db * b
            da, db = da * gamma_a, db * gamma_b
            mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
            da, db = (da - a * mean) * rstd, (db - b * mean) * rstd
            products += (da * a + db * b) / rstd
        _store(out, heads, first, da, db, HALF, BLOCK)
    return gamma_a_sum, gamma_b_sum, products


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    gradients,
    strides,
    z,
    out,
    gammas,
    d_gamma,
    sums,
    cos,
    sin,
    sizes,
    eps,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of packed queries, keys and values. ``gradients``: the gradients of q, k and v.
    ``strides``: each gradient's strides of sequence, head and token. Each Triton program adds values of its
    heads in registers. The program sums over heads only once per token and at its end, because a sum over
    heads makes the warps wait for each other."""
    tokens, length, period, heads, groups = sizes
    width: tl.constexpr = 2 * HALF
    zeros = tl.zeros((BLOCK, HALF), tl.float32)
    q_a, q_b, k_a, k_b = zeros, zeros, zeros, zeros
    first_token, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for turn in range(0, tl.cdiv(tokens - tl.program_id(0), programs)):
        token = first_token + turn * programs
        sequence, at = token // length, token % length
        start = token * (heads + 2 * groups) * width
        c, s = cos + token % period * width, sin + token % period * width
        dq = gradients[0] + sequence * strides[0] + at * strides[2]
        q_a, q_b, products = _backward_heads(
            *(dq, strides[1], z + start, out + start, gammas[0], c, s, heads, eps, (q_a, q_b, zeros)),
            *(HALF, NORMED, BLOCK),
        )
        start += heads * width
        dk = gradients[1] + sequence * strides[3] + at * strides[5]
        k_a, k_b, products = _backward_heads(
            *(dk, strides[4], z + start, out + start, gammas[1], c, s, groups, eps, (k_a, k_b, products)),
            *(HALF, NORMED, BLOCK),
        )
        start += groups * width
        dv = gradients[2] + sequence * strides[6] + at * strides[8]
        for first in range(0, groups, BLOCK):
            a, b = _load(dv, groups, first, strides[7], HALF, BLOCK)
            _store(out + start, groups, first, a, b, HALF, BLOCK)
            if NORMED:
                value_a, value_b = _load(z + start, groups, first, 2 * HALF, HALF, BLOCK)
                products += a * value_a + b * value_b
        if NORMED:
            tl.store(sums + token, tl.sum(products))
    if NORMED:
        d_gamma += tl.program_id(0) * 2 * width + tl.arange(0, HALF)
        tl.store(d_gamma, tl.sum(q_a, 0))
        tl.store(d_gamma + HALF, tl.sum(q_b, 0))
        tl.store(d_gamma + 2 * HALF, tl.sum(k_a, 0))
        tl.store(d_gamma + 3 * HALF, tl.sum(k_b, 0))


def forward(
    packed: Tensor, cos: Tensor, sin: Tensor, groups: int, gammas: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``heads.heads`` for contiguous tensors."""
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
    """Return the gradient of ``packed``, the gradients of the two norms' weights, and the row sums of
    ``packed`` times its gradient, [tokens] in fp32. Without norms, the last three results are None."""
    d = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in gradients)
    sequences, length, columns = packed.shape
    width, tokens = cos.shape[-1], sequences * length
    normed, programs = gammas[0] is not None, min(PROGRAMS, tokens)
    read = tuple(packed if gamma is None else gamma for gamma in gammas)
    out, d_gamma = torch.empty_like(packed), cos.new_empty(programs, 2, width, dtype=torch.float32)
    sums = cos.new_empty(tokens if normed else 0, dtype=torch.float32)
    strides = tuple(t.stride(axis) for t in d for axis in range(3))
    sizes = (tokens, length, cos.numel() // width, columns // width - 2 * groups, groups)
    launch: Any = _backward[programs,]
    launch(
        *(d, strides, packed, out, read, d_gamma, sums, cos, sin, sizes, eps),
        HALF=width // 2,
        NORMED=normed,
        BLOCK=BLOCK,
    )
    if not normed:
        return out, None, None, None
    q, k = (t.type_as(gamma) for t, gamma in zip(d_gamma.sum(0), gammas, strict=True) if gamma is not None)
    return out, q, k, sums
