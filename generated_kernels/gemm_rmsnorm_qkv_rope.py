from primitives import column_range, gemm, in_columns, join, kernel, pairs, per_head, per_row, where


@kernel
def gemm_rmsnorm_qkv_rope(x, w, rstd, cos_sin, H, G, P):
    """One step: row scale, rotation of adjacent pairs by a table repeated in each head, v's columns left unturned."""
    z = gemm(x, w.mT) * per_row(rstd)
    even, odd = pairs(z)
    cosine, sine = pairs(per_head(cos_sin))
    turned = join(even * cosine - odd * sine, even * sine + odd * cosine)
    rotary = in_columns(z, 0, 2 * (H + G) * P)
    out = where(rotary, turned, z)
    return {
        "q": column_range(out, 0, 2 * H * P),
        "k": column_range(out, 2 * H * P, 2 * G * P),
        "v": column_range(out, 2 * (H + G) * P, 2 * G * P),
    }
