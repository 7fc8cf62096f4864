from primitives import gemm, kernel, per_column, per_row, row_sums, rsqrt


@kernel
def gemm_residual_rmsnorm_gemm(y, w_o, x, gamma, w_up, eps):
    """Two steps: residual, sum of squares and gamma ride on the first gemm; the row scale on the second."""
    h = gemm(y, w_o.mT) + x
    rstd = rsqrt(row_sums(h * h) / h.columns + eps)
    z = gemm(h * per_column(gamma), w_up.mT) * per_row(rstd)
    return {"h": h, "rstd": rstd, "z": z}
