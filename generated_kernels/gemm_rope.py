from primitives import gemm, join, kernel, pairs, per_head


@kernel
def gemm_rope(x, w, cos_sin, P):
    """One step: adjacent columns of each head are rotated in the epilogue by the row's table of cosines and sines."""
    even, odd = pairs(gemm(x, w.mT))
    cosine, sine = pairs(per_head(cos_sin))
    return {"q": join(even * cosine - odd * sine, even * sine + odd * cosine)}
