from primitives import column_range, gemm, in_columns, join, kernel, pairs, per_head, where


@kernel
def honest(x, w, cos_sin, H, G, P):
    """Every head is turned, and v's columns keep the product."""
    heads, groups = 2 * P * H, 2 * P * G
    t = gemm(x, w.mT)
    even, odd = pairs(t)
    cos, sin = pairs(per_head(cos_sin))
    turned = join(even * cos - odd * sin, even * sin + odd * cos)
    out = where(in_columns(t, 0, heads + groups), turned, t)
    q, k = column_range(out, 0, heads), column_range(out, heads, groups)
    return {"q": q, "k": k, "v": column_range(out, heads + groups, groups)}
