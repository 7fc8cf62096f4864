from primitives import gemm, kernel, pairs, per_row, silu


@kernel
def gemm_rmsnorm_swiglu(x, w, rstd):
    """One step: row scale, stored pre-activation and SwiGLU of adjacent columns ride in one gemm's epilogue."""
    preact = gemm(x, w.mT) * per_row(rstd)
    gate, up = pairs(preact)
    return {"preact": preact, "act": silu(gate) * up}
