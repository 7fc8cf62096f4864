from primitives import gemm, head_sums, kernel, per_head, rope, rsqrt


@kernel
def gemm_qk_norm_rope(x, w, gamma, positions, inv_freq, eps, P):
    """One step: head statistics of the accumulator, then norm, gamma and rotation in the same epilogue."""
    t = gemm(x, w.mT)
    rstd = rsqrt(head_sums(t ** 2, 2 * P) / (2 * P) + eps)
    normed = t * per_head(rstd) * per_head(gamma)
    return {"q": rope(normed, positions, inv_freq), "rstd": rstd}
