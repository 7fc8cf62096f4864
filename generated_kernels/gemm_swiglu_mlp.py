from primitives import gemm, kernel, pairs, silu


@kernel
def gemm_swiglu_mlp(x, w_gate_up, w_down):
    """Two steps: SwiGLU rides on the gate-and-up gemm, which stores preact and act; the second gemm reads act."""
    preact = gemm(x, w_gate_up.mT)
    gate, up = pairs(preact)
    act = silu(gate) * up
    return {"preact": preact, "act": act, "out": gemm(act, w_down.mT)}
