from primitives import gemm, kernel


@kernel
def gemm_alpha_residual(y, w, x, alpha):
    """One step: the unrounded product is scaled by alpha and added to the residual tile in the epilogue."""
    return {"h": x + alpha * gemm(y, w.mT)}
