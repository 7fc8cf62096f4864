from primitives import (
    column_range,
    gemm,
    in_columns,
    join,
    kernel,
    pairs,
    per_column,
    per_head,
    per_row,
    where,
)


@kernel
def honest(x, w, rstd, bias, cos_sin, H, G, P):
    """Scaled, shifted, turned, in this order; v's columns stop after the second."""
    heads, groups = 2 * P * H, 2 * P * G
    t = gemm(x, w.mT) * per_row(rstd) + per_column(bias)
    even, odd = pairs(t)
    cos, sin = pairs(per_head(cos_sin))
    turned = join(even * cos - odd * sin, even * sin + odd * cos)
    out = where(in_columns(t, 0, heads + groups), turned, t)
    q, k = column_range(out, 0, heads), column_range(out, heads, groups)
    return {"q": q, "k": k, "v": column_range(out, heads + groups, groups)}
