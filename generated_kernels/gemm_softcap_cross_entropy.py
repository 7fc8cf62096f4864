from primitives import gemm, kernel, row_logsumexp, row_select, tanh


@kernel
def gemm_softcap_cross_entropy(x, w, target, cap):
    """One step: cap the logits in registers, and reduce the unrounded values along each row beside the store."""
    logits = cap * tanh(gemm(x, w.mT) * (1 / cap))
    return {
        "logits": logits,
        "lse": row_logsumexp(logits),
        "target_logit": row_select(logits, target),
    }
