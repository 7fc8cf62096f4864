from primitives import abs, column_range, gemm, head_sums, in_columns, join, kernel, pairs, per_head, where


@kernel
def gemm_shear_heads(x, w, shear, A, B, P):
    """A head's statistic is final in its own step. A table [M, 2P] applies to each head. Cut ranges last."""
    z = gemm(x, w.mT)
    size = head_sums(abs(z), 2 * P) / (2 * P)
    u, v = pairs(z * per_head(1 / (1 + size)))
    s, t = pairs(per_head(shear))
    heads = where(in_columns(z, 0, 2 * A * P), join(u + s * v, v + t * u), z)
    return {"a": column_range(heads, 0, 2 * A * P), "b": column_range(heads, 2 * A * P, 2 * B * P)}
