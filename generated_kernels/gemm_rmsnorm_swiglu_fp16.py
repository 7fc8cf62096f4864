from primitives import gemm, kernel, pairs, per_row, silu


@kernel
def gemm_rmsnorm_swiglu_fp16(x, w, rstd):
    """One step: the deferred row scale and SwiGLU ride in the epilogue of the gate-and-up gemm."""
    preact = gemm(x, w.mT) * per_row(rstd)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
