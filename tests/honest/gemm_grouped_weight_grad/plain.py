from primitives import gemm, kernel


@kernel
def weight_gradient(dz, x, offsets):
    """One product for each expert."""
    return {"dw": gemm(dz.mT, x, offsets)}
