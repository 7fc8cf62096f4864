from primitives import column_range, gemm, in_columns, join, kernel, pairs, per_head, where


@kernel
def gemm_qkv_rope(x, w, cos_sin, H, G, P):
    """One step: pairs of q's and k's heads are turned in the epilogue, v's stay, and the tile is cut in three."""
    t = gemm(x, w.mT)
    even, odd = pairs(t)
    cosine, sine = pairs(per_head(cos_sin))
    turned = join(even * cosine - odd * sine, even * sine + odd * cosine)
    of_v = in_columns(t, 2 * H * P + 2 * G * P, 2 * G * P)
    done = where(of_v, t, turned)
    return {
        "q": column_range(done, 0, 2 * H * P),
        "k": column_range(done, 2 * H * P, 2 * G * P),
        "v": column_range(done, 2 * H * P + 2 * G * P, 2 * G * P),
    }
