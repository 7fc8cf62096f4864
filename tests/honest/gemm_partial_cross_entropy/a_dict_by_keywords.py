"""dict(...) for braces, parameters by name, and parentheses wherever they may stand."""

from primitives import gemm, kernel, row_logsumexp, row_select


@kernel
def keywords(*, target, x, w):
    (z) = gemm(x, (w).mT)
    ((lse), [picked]) = (row_logsumexp(z), [row_select(z, target)])
    return dict(target_logit=picked, lse=lse, logits=z)
