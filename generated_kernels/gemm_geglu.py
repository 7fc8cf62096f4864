from primitives import gelu, gemm, kernel, pairs


@kernel
def gemm_geglu(x, w):
    """One step: the pre-activation and its GeGLU, at half the width, leave the epilogue of one gemm."""
    preact = gemm(x, w.mT)
    gate, up = pairs(preact)
    return {"preact": preact, "act": gelu(gate) * up}
