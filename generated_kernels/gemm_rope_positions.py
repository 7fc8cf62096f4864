from primitives import gemm, kernel, rope


@kernel
def gemm_rope_positions(x, w, positions, inv_freq, P):
    """One step: each head's adjacent columns are turned in the epilogue, by angles made there in fp32."""
    return {"q": rope(gemm(x, w.mT), positions, inv_freq)}
