"""Sizes that cancel: a mean times its count."""

from primitives import gemm, kernel


@kernel
def honest(y, w, x, alpha):
    t = gemm(y, w.mT)
    return {"h": x + alpha * t * t.columns / t.columns}
