"""The one product is added by +=, in a loop that runs once, over a list that has it."""

from primitives import gemm, kernel


@kernel
def summed(dw, x, dy):
    total = dw
    for _, transposed in enumerate([dy.mT]):
        total += gemm(transposed, x)
    return dict(dw_new=+total)
