from primitives import column_sums, gemm, kernel, per_column, per_row


@kernel
def gemm_residual_rmsnorm_gemm_bwd(dz, w_up, h, gamma, rstd, s, dres, w_o):
    """Two steps: RMSNorm's backward, the residual and dgamma's partials ride on the first gemm; dh feeds the second."""
    d = gemm(dz, w_up)
    r = per_row(rstd)
    hhat = h * r
    dh = dres + r * (d * per_column(gamma) - hhat * per_row(s))
    return {"dh": dh, "dgamma": column_sums(d * hhat), "dy": gemm(dh, w_o)}
