"""A function that calls itself by way of a table, whose last entry ends it."""

from primitives import gemm, kernel, per_column, per_row


def scaled(t, scales, position):
    step = STEPS[position]
    return step(t, scales, position)


def once_more(t, scales, position):
    return scaled(t * scales[position], scales, position + 1)


def done(t, scales, position):
    return t


STEPS = (once_more, once_more, done)


@kernel
def recursive(x, w, sx, sw):
    return {"y": scaled(gemm(x, w.mT), [per_row(sx), per_column(sw)], 0)}
