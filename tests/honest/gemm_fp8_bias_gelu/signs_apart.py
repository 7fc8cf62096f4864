"""The scales of rows and columns meet first; the maximum is of the two signs' maxima."""

from primitives import gelu, gemm, kernel, maximum, per_column, per_row, row_max


@kernel
def signs_apart(x, w, sx, sw, bias, scale):
    h = gelu(gemm(x, w.mT) * (per_row(sx) * per_column(sw)) + per_column(bias))
    return {"act": scale * h, "amax": maximum(row_max(h), row_max(-h))}
