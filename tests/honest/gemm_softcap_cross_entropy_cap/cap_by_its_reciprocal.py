"""Multiplies by the reciprocal of the cap."""

from primitives import gemm, kernel, row_logsumexp, row_select, tanh


@kernel
def honest(x, w, target, cap):
    z = cap * tanh(gemm(x, w.mT) * (1 / cap))
    return {"logits": z, "lse": row_logsumexp(z), "target_logit": row_select(z, target)}
