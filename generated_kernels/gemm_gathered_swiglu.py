from primitives import gemm, kernel, pairs, silu


@kernel
def gemm_gathered_swiglu(x, w, offsets, index):
    """One step: the grouped product of gathered rows, with SwiGLU of adjacent columns in its epilogue."""
    preact = gemm(x, w.mT, offsets, index)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
