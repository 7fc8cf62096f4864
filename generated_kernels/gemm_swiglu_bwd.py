from primitives import gemm, join, kernel, pairs, row_sums, sigmoid


@kernel
def gemm_swiglu_bwd(dy, w_down, z):
    """One step: z comes in as pairs beside the gemm's half-width tile, dz goes out as pairs."""
    d = gemm(dy, w_down)
    gate, up = pairs(z)
    sig = sigmoid(gate)
    swish = gate * sig
    act = swish * up
    dgate = d * up * (sig + swish * (1 - sig))
    dup = d * swish
    return {"dz": join(dgate, dup), "act": act, "s": row_sums(dgate * gate + d * act)}
