from primitives import gemm, head_sums, kernel, per_head, rope, rsqrt


@kernel
def gemm_qk_norm_rope(x, w, gamma, positions, inv_freq, eps, P):
    """One step: each head's RMS is final in the epilogue, then scales the head, with gamma, before its rotation."""
    width = 2 * P
    t = gemm(x, w.mT)
    rstd = rsqrt(head_sums(t * t, width) / width + eps)
    normed = t * per_head(rstd) * per_head(gamma)
    return {"q": rope(normed, positions, inv_freq), "rstd": rstd}
