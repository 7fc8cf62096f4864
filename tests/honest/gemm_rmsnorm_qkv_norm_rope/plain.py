from primitives import (
    column_range,
    gemm,
    head_sums,
    in_columns,
    join,
    kernel,
    pairs,
    per_head,
    per_row,
    rsqrt,
    where,
)


@kernel
def honest(x, w, rstd, gamma_q, gamma_k, eps, cos_sin, H, G, P):
    """All heads have statistics; q's and k's use them, each with its weight."""
    width = 2 * P
    t = gemm(x, w.mT) * per_row(rstd)
    scale = rsqrt(head_sums(t * t, width) / width + eps)
    gamma = where(in_columns(t, 0, width * H), per_head(gamma_q), per_head(gamma_k))
    even, odd = pairs(t * per_head(scale) * gamma)
    cos, sin = pairs(per_head(cos_sin))
    turned = join(even * cos - odd * sin, even * sin + odd * cos)
    out = where(in_columns(t, 0, width * (H + G)), turned, t)
    q, k = column_range(out, 0, width * H), column_range(out, width * H, width * G)
    return {"q": q, "k": k, "v": column_range(out, width * (H + G), width * G)}
