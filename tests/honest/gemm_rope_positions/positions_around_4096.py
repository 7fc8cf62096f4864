"""Positions less a number, and the number again: both are exact."""

from primitives import gemm, kernel, rope


@kernel
def honest(x, w, positions, inv_freq, P):
    return {"q": rope(gemm(x, w.mT), (positions - 4096) + 4096, inv_freq)}
