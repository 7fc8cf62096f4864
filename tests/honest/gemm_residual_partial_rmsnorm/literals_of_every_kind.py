"""Numbers written as ints, floats, powers and truth values, folded before the tracer sees a tensor."""

from primitives import gemm, kernel, per_column, row_sums, rsqrt

ONE = 1e0
TABLE = [0x10, 1_000, 2**-1, +True, -0.0]


@kernel
def literal(y, w, x, gamma, eps):
    h = gemm(y, w.mT) + x
    epsilon = eps * ONE * (TABLE[0] / 16) ** 3 + TABLE[4] * TABLE[1] // 7
    epsilon = epsilon * (TABLE[2] + TABLE[2]) * TABLE[3]
    return {"rstd": rsqrt(row_sums(h * h) / h.columns + epsilon), "hg": h * per_column(gamma), "h": +h}
