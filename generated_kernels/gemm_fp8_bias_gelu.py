from primitives import gelu, gemm, kernel, per_column, per_row, row_abs_max


@kernel
def gemm_fp8_bias_gelu(x, w, sx, sw, bias, scale):
    """One step: scaled fp8 product, bias and GELU; the activation leaves by the delayed scale, with its rows' amax."""
    z = gemm(x, w.mT) * per_row(sx) * per_column(sw) + per_column(bias)
    h = gelu(z)
    return {"act": h * scale, "amax": row_abs_max(h)}
