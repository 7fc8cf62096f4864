"""The scale as 1 and what is left of it."""

from primitives import gemm, kernel


@kernel
def honest(y, w, x, alpha):
    t = gemm(y, w.mT)
    return {"h": x + (t + (alpha - 1) * t)}
