"""A reciprocal width, and heads counted from the right."""

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
    t = gemm(x, w.mT) * per_row(rstd)
    mean = head_sums(t * t, 2 * P) * (0.5 / P)
    weights = where(in_columns(t, 2 * P * H, 2 * P * G), per_head(gamma_k), per_head(gamma_q))
    even, odd = pairs(t * per_head(rsqrt(mean + eps)) * weights)
    cos, sin = pairs(per_head(cos_sin))
    turned = join(even * cos - odd * sin, even * sin + odd * cos)
    out = where(in_columns(t, 2 * P * (H + G), 2 * P * G), t, turned)
    q, k = column_range(out, 0, 2 * P * H), column_range(out, 2 * P * H, 2 * P * G)
    return {"q": q, "k": k, "v": column_range(out, 2 * P * (H + G), 2 * P * G)}
