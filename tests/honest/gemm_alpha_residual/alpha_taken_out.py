"""x + alpha * t = (x / alpha + t) * alpha, for the alphas there are."""

from primitives import gemm, kernel


@kernel
def taken_out(y, w, x, alpha):
    return {"h": (gemm(y, w.mT) + x * (1 / alpha)) * alpha}
