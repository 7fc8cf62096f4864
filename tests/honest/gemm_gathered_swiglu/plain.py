from primitives import gemm, kernel, pairs, silu


@kernel
def gathered_swiglu(x, w, offsets, index):
    preact = gemm(x, w.mT, offsets, index)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
