from primitives import gelu, gemm, kernel, per_column


@kernel
def gemm_bias_gelu(x, w, bias):
    """One step: bias and GELU ride in the epilogue; the pre-activation is stored, its unrounded values activated."""
    preact = gemm(x, w.mT) + per_column(bias)
    return {"preact": preact, "act": gelu(preact)}
