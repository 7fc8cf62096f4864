"""The norm as a function of tile and width."""

from primitives import gemm, head_sums, join, kernel, pairs, per_head, rope, rsqrt


def root_mean_square(t, width, eps):
    return rsqrt(head_sums(t**2, width) / width + eps)


@kernel
def normed(P, eps, inv_freq, positions, gamma, w, x):
    t = gemm(x, w.mT)
    rstd = root_mean_square(t, 2 * P, eps)
    scaled = t * per_head(rstd) * per_head(gamma)
    halves = {"odd": 1, "even": 0}
    halves["even"], halves["odd"] = pairs(scaled)
    return {"q": rope(join(halves["even"], halves["odd"]), positions, inv_freq), "rstd": rstd}
