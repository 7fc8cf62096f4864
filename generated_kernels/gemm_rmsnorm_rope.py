from primitives import gemm, join, kernel, pairs, per_head, per_row


@kernel
def gemm_rmsnorm_rope(x, w, rstd, cos_sin, P):
    """One step: the row scale and the table's rotation ride in the epilogue of one gemm."""
    even, odd = pairs(gemm(x, w.mT) * per_row(rstd))
    cosine, sine = pairs(per_head(cos_sin))
    return {"q": join(even * cosine - odd * sine, even * sine + odd * cosine)}
