"""The mean as half a sum over the pairs of a head."""

from primitives import gemm, head_sums, join, kernel, pairs, per_head, rope, rsqrt


@kernel
def honest(x, w, gamma, positions, inv_freq, eps, P):
    t = gemm(x, w.mT)
    rstd = rsqrt(head_sums(t * t, 2 * P) * (0.5 / P) + eps)
    even, odd = pairs(t * per_head(rstd) * per_head(gamma))
    return {"q": rope(join(even, odd), positions, inv_freq), "rstd": rstd}
