from primitives import column_range, gemm, in_columns, join, kernel, pairs, per_column, per_head, per_row, where


@kernel
def gemm_rmsnorm_qkv_bias_rope(x, w, rstd, bias, cos_sin, H, G, P):
    """One step: row scale, bias and rotation ride in the epilogue; q, k and v are ranges of one tile."""
    t = gemm(x, w.mT) * per_row(rstd) + per_column(bias)
    even, odd = pairs(t)
    cosine, sine = pairs(per_head(cos_sin))
    turned = join(even * cosine - odd * sine, even * sine + odd * cosine)
    heads = where(in_columns(t, 0, 2 * (H + G) * P), turned, t)
    return {
        "q": column_range(heads, 0, 2 * H * P),
        "k": column_range(heads, 2 * H * P, 2 * G * P),
        "v": column_range(heads, 2 * (H + G) * P, 2 * G * P),
    }
