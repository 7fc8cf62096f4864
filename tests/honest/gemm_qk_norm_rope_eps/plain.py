from primitives import gemm, head_sums, kernel, per_head, rope, rsqrt


@kernel
def honest(x, w, gamma, positions, inv_freq, eps, P):
    """eps meets each head's statistic, within the step."""
    t = gemm(x, w.mT)
    width = 2 * P
    rstd = rsqrt(eps + head_sums(t * t, width) / width)
    scaled = t * per_head(rstd)
    return {"q": rope(scaled * per_head(gamma), positions, inv_freq), "rstd": rstd}
