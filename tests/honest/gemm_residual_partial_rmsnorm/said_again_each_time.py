"""Every output is written out from the inputs: equal expressions are one value."""

from primitives import gemm, kernel, per_column, row_sums, rsqrt


@kernel
def again(y, w, x, gamma, eps):
    return {
        "h": gemm(y, w.mT) + x,
        "hg": (gemm(y, w.mT) + x) * per_column(gamma),
        "rstd": rsqrt(
            row_sums((gemm(y, w.mT) + x) * (gemm(y, w.mT) + x)) / (gemm(y, w.mT) + x).columns + eps
        ),
    }
