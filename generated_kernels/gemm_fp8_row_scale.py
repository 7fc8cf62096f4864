from primitives import gemm, kernel, per_column, per_row


@kernel
def gemm_fp8_row_scale(x, w, sx, sw):
    """One step: the fp8 gemm's accumulator takes the token and channel scales in its epilogue."""
    return {"y": gemm(x, w.mT) * per_row(sx) * per_column(sw)}
