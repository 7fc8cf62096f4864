"""Softmax and one-hot rows as functions of their own, with the target handed through both."""

from primitives import column_index, exp, gemm, kernel, per_row, where


def softmax(z, lse):
    return exp(z - per_row(lse))


def hit(z, target):
    return column_index(z) == per_row(target)


def less_one(p, where_hit):
    return where(where_hit, p - True, p)


@kernel
def masked(target, x, dloss, w, lse):
    z = gemm(x, w.mT)
    return {"dlogits": less_one(softmax(z, lse), hit(z, target)) * per_row(dloss)}
