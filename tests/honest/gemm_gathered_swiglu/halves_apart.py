from primitives import exp, gemm, join, kernel, pairs


@kernel
def gathered(x, w, offsets, index):
    """The pairs part, and meet again as what is stored."""
    gate, up = pairs(gemm(x, w.mT, offsets, index))
    return {"act": up * gate / (1 + exp(-gate)), "preact": join(gate, up)}
