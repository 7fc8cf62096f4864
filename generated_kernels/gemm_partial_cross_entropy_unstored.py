from primitives import gemm, kernel, row_logsumexp, row_select


@kernel
def gemm_partial_cross_entropy_unstored(x, w, target):
    """One step: both row reductions ride on the unrounded logits in registers; only vectors leave it."""
    logits = gemm(x, w.mT)
    return {"lse": row_logsumexp(logits), "target_logit": row_select(logits, target)}
