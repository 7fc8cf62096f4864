"""First and second moment by one comprehension."""

from primitives import gemm, kernel, per_column, row_sums, rsqrt


def moments(t):
    return [row_sums(power) / t.columns for power in (t, t**2)]


@kernel
def begun(y, w, x, gamma, eps):
    h = gemm(y, w.mT) + x
    mean, second = moments(h)
    variance = second - mean**2
    return {"mean": mean, "rstd": rsqrt(variance + eps), "hg": h * per_column(gamma), "h": h}
