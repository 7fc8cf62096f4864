from primitives import gemm, head_sums, kernel, per_head, rope, rsqrt


@kernel
def gemm_qk_norm_rope_eps(x, w, gamma, positions, inv_freq, eps, P):
    """One step: a head's statistic is final in its own epilogue; norm, weight and rotation follow there."""
    t = gemm(x, w.mT)
    rstd = rsqrt(head_sums(t ** 2, 2 * P) / (2 * P) + eps)
    q = rope(t * per_head(rstd) * per_head(gamma), positions, inv_freq)
    return {"q": q, "rstd": rstd}
