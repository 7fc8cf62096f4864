from primitives import column_sums, gemm, kernel, per_column, per_row


@kernel
def gemm_residual_rmsnorm_bwd(dz, w, h, gamma, rstd, s, dres):
    """One step: dx, the partial sums of dgamma and hn all ride in the epilogue of one gemm; h is read once."""
    d = gemm(dz, w)
    scale = per_row(rstd)
    weight = per_column(gamma)
    hhat = h * scale
    dx = dres + scale * (d * weight - hhat * per_row(s))
    return {"dx": dx, "dgamma": column_sums(d * hhat), "hn": hhat * weight}
