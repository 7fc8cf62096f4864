"""The dict of outputs is filled in a loop, and in another order than the spec's."""

from primitives import gemm, kernel, per_column, row_sums, rsqrt

NAMES = ("rstd", "hg", "h")


def norm(t, eps):
    return rsqrt(row_sums(t**2) / t.columns + eps)


@kernel
def filled(x, gamma, y, w, eps):
    h = gemm(y, w.mT) + x
    outputs = {}
    for name, value in zip(NAMES, (norm(h, eps), h * per_column(gamma), h), strict=True):
        outputs[name] = value
    return outputs
