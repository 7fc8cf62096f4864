from primitives import gemm, kernel, per_row


@kernel
def gemm_rmsnorm(x, w, rstd):
    """One step: the deferred RMSNorm row scale meets the accumulator of the projection's gemm."""
    return {"y": gemm(x, w.mT) * per_row(rstd)}
