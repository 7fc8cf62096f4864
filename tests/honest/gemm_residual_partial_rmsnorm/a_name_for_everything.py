"""Projection, residual and the beginning of RMSNorm, a name for whatever can have one.

Norm and projection commute: (rstd * h * gamma) @ W = rstd * ((h * gamma) @ W), so only hg has to be there
when the next matmul starts. In the letters of the paper: h = y Wᵀ + x, ĥ = h ⊙ γ, ρ = (mean(h²) + ε)^(-½).
"""

from primitives import gemm, kernel, per_column, row_sums, rsqrt


@kernel
def begun(y, w, x, gamma, eps):
    """ρ waits for the whole row; nothing else does. 残差を足してから二乗する。"""
    weight = w.mT  # [K, N]: Wᵀ
    accumulator = gemm(y, weight)
    stream = accumulator + x
    spread = per_column(gamma)  # γ
    weighted = stream * spread  # ĥ
    squares = stream * stream
    total = row_sums(squares)
    width = stream.columns
    mean = total / width
    shifted = mean + eps  # ε keeps a row of zeros finite
    reciprocal = rsqrt(shifted)  # ρ
    outputs = {"h": stream, "hg": weighted, "rstd": reciprocal}
    return outputs
