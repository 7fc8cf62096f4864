"""Gauss's complex product: three multiplications and five additions for four and two."""

from primitives import gemm, join, kernel, pairs, per_head


@kernel
def gauss(x, w, cos_sin, P):
    even, odd = pairs(gemm(x, w.mT))
    c, s = pairs(per_head(cos_sin))
    common = c * (even + odd)
    return {"q": join(common - odd * (c + s), common + even * (s - c))}
