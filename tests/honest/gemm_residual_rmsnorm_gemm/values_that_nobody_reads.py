"""A dead matmul, dead statistics and a dead loop: what reaches no output is not part of the program."""

from primitives import exp, gemm, kernel, per_column, per_row, row_max, row_sums, rsqrt

DEBUG = 3


@kernel
def littered(y, w_o, x, gamma, w_up, eps):
    h = gemm(y, w_o.mT) + x
    largest = row_max(h)
    for _ in range(DEBUG):
        largest = largest + exp(largest)
    rstd = rsqrt(row_sums(h * h) / h.columns + eps)
    unscaled = gemm(h, w_up.mT)
    unscaled = unscaled * 1e-3 - unscaled
    z = gemm(h * per_column(gamma), w_up.mT)
    return {"h": h, "rstd": rstd, "z": z * per_row(rstd)}
