from primitives import gemm, kernel, pairs, silu


@kernel
def gemm_swiglu(x, w):
    """One step: the pre-activation and its SwiGLU both leave from the epilogue of one gemm."""
    preact = gemm(x, w.mT)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
