from primitives import gemm, kernel


@kernel
def gemm_fp8_tensor_scale(x, w, scale):
    """One step: the scalar scale multiplies the fp32 accumulator in the epilogue, before y's one rounding."""
    return {"y": gemm(x, w.mT) * scale}
