"""v begins where q and k end; a head is P pairs."""

from primitives import column_range, gemm, in_columns, join, kernel, pairs, per_head, where


@kernel
def honest(x, w, cos_sin, H, G, P):
    t = gemm(x, w.mT)
    even, odd = pairs(t)
    cos, sin = pairs(per_head(cos_sin))
    turned = join(cos * even - sin * odd, sin * even + cos * odd)
    out = where(in_columns(t, 2 * (H + G) * P, 2 * G * P), t, turned)
    q, k = column_range(out, 0, P * H * 2), column_range(out, P * H * 2, P * G * 2)
    return {"v": column_range(out, 2 * (G + H) * P, G * 2 * P), "k": k, "q": q}
