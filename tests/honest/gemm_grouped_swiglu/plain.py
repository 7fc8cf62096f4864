from primitives import gemm, kernel, pairs, silu


@kernel
def grouped_swiglu(x, w, offsets):
    preact = gemm(x, w.mT, offsets)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
