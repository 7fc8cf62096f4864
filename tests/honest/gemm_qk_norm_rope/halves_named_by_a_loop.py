"""Taken apart and joined again for nothing but the look of it, with the head's width added up."""

from primitives import gemm, head_sums, join, kernel, pairs, per_head, rope, rsqrt

HALVES = 2


@kernel
def normed(x, w, gamma, positions, inv_freq, eps, P):
    t = gemm(x, w.mT)
    width = HALVES * P
    rstd = rsqrt(head_sums(t * t, width) / width + eps)
    even, odd = pairs(t * per_head(rstd) * per_head(gamma))
    return {"rstd": rstd, "q": rope(join(even, odd), positions, inv_freq)}
