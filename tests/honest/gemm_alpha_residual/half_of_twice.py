"""The scale is halved, and the product doubled."""

from primitives import gemm, kernel


@kernel
def honest(y, w, x, alpha):
    return {"h": x + (alpha / 2) * (2 * gemm(y, w.mT))}
