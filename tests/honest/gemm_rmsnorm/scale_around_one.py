"""The product, and the rest of the scale times it."""

from primitives import gemm, kernel, per_row


@kernel
def honest(x, w, rstd):
    t = gemm(x, w.mT)
    return {"y": t * per_row(rstd * 0.5) * 2}
