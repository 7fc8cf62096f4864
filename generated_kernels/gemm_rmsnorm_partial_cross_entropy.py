from primitives import gemm, kernel, per_row, row_logsumexp, row_select


@kernel
def gemm_rmsnorm_partial_cross_entropy(x, w, rstd, target):
    """One step: the deferred row scale, then log-sum-exp and the target's logit from the unrounded logits."""
    logits = gemm(x, w.mT) * per_row(rstd)
    return {
        "logits": logits,
        "lse": row_logsumexp(logits),
        "target_logit": row_select(logits, target),
    }
