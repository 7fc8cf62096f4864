"""gamma and the scale are one factor of the columns; the maximum is taken before the scale."""

from primitives import gemm, kernel, per_column, per_row, row_abs_max, row_sums, rsqrt


@kernel
def one_weight(y, w, sy, sw, x, gamma, scale, eps):
    h = x + per_row(sy) * (gemm(y, w.mT) * per_column(sw))
    mean = row_sums(h**2) / h.columns
    return {
        "hg": h * per_column(gamma * scale),
        "amax": row_abs_max(h * per_column(gamma)),
        "rstd": rsqrt(eps + mean),
        "h": h,
    }
