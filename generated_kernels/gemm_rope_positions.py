from primitives import gemm, kernel, rope


@kernel
def gemm_rope_positions(x, w, positions, inv_freq, P):
    """One step: the rotary embedding rides in the projection's epilogue, its angles made there in fp32."""
    return {"q": rope(gemm(x, w.mT), positions, inv_freq)}
