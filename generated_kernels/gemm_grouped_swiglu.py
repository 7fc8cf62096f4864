from primitives import gemm, kernel, pairs, silu


@kernel
def gemm_grouped_swiglu(x, w, offsets):
    """One step: the grouped product is stored, and SwiGLU of its column pairs rides in its epilogue."""
    preact = gemm(x, w.mT, offsets)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
