from primitives import column_range, gemm, head_sums, in_columns, join, kernel, pairs, per_head, per_row, rsqrt, where


@kernel
def gemm_rmsnorm_qkv_norm_rope(x, w, rstd, gamma_q, gamma_k, eps, cos_sin, H, G, P):
    """One step: row scale, norm of each head, its weight and its rotation, all in one gemm's epilogue."""
    heads = gemm(x, w.mT) * per_row(rstd)
    scale = rsqrt(head_sums(heads * heads, 2 * P) / (2 * P) + eps)
    gamma = where(in_columns(heads, 0, 2 * H * P), per_head(gamma_q), per_head(gamma_k))
    even, odd = pairs(heads * per_head(scale) * gamma)
    cos, sin = pairs(per_head(cos_sin))
    turned = join(even * cos - odd * sin, even * sin + odd * cos)
    done = where(in_columns(heads, 2 * H * P + 2 * G * P, 2 * G * P), heads, turned)
    return {
        "q": column_range(done, 0, 2 * H * P),
        "k": column_range(done, 2 * H * P, 2 * G * P),
        "v": column_range(done, 2 * H * P + 2 * G * P, 2 * G * P),
    }
