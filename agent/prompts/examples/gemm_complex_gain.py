from primitives import gemm, join, kernel, pairs


@kernel
def gemm_complex_gain(x, w, gain):
    """Adjacent columns are taken apart and put together again; outputs of two widths in one step."""
    a, b = pairs(gemm(x, w))
    c, d = pairs(gain)
    real, imaginary = a * c - b * d, a * d + b * c
    return {"out": join(real, imaginary), "power": real * real + imaginary * imaginary}
