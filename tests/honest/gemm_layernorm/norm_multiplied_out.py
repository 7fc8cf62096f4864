"""The row's scale reaches product and mean apart: rstd * mean is a vector, made before the step."""

from primitives import gemm, kernel, per_column, per_row


@kernel
def apart(x, w, mean, rstd, wg, wb):
    shift = per_row(-mean * rstd)
    return {"z": per_row(rstd) * gemm(x, w.mT) + (per_column(wb) + shift * per_column(wg))}
