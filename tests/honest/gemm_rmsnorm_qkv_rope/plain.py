from primitives import column_range, gemm, in_columns, join, kernel, pairs, per_head, per_row, where


@kernel
def honest(x, w, rstd, cos_sin, H, G, P):
    """The table is left out, as an angle of zero, where the pair is v's."""
    width = 2 * P
    t = gemm(x, w.mT) * per_row(rstd)
    even, odd = pairs(t)
    cos, sin = pairs(per_head(cos_sin))
    is_v = in_columns(even, P * (H + G), P * G)
    cos, sin = where(is_v, 1, cos), where(is_v, 0, sin)
    out = join(even * cos - odd * sin, even * sin + odd * cos)
    q, k = column_range(out, 0, H * width), column_range(out, H * width, G * width)
    return {"v": column_range(out, H * width + G * width, G * width), "q": q, "k": k}
