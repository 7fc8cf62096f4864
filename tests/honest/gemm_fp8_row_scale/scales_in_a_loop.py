"""The two scales, each with its way to spread, multiplied in a loop."""

from primitives import gemm, kernel, per_column, per_row


@kernel
def looped(x, w, sx, sw):
    y = gemm(x, w.mT)
    for spread, scale in ((per_row, sx), (per_column, sw)):
        y = y * spread(scale)
    return {"y": y}
