from primitives import gemm, kernel, per_column, row_sums, rsqrt


@kernel
def gemm_residual_partial_rmsnorm(y, w, x, gamma, eps):
    """One step: residual, weight and squares ride on the projection; rstd is finished from row sums after it."""
    h = gemm(y, w.mT) + x
    hg = h * per_column(gamma)
    rstd = rsqrt(row_sums(h * h) / h.columns + eps)
    return {"h": h, "hg": hg, "rstd": rstd}
