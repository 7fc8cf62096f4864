from primitives import column_sums, gemm, kernel, sigmoid


@kernel
def gemm_gelu_bwd(dy, w_down, z, c, a):
    """One step: GELU and its derivative share one sigmoid, h = (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    d = gemm(dy, w_down)
    linear = 2 * c
    cubic = linear * a
    square = z * z
    h = sigmoid(z * (linear + cubic * square))
    act = z * h
    slope = linear + (3 * cubic) * square
    dz = d * (h + (act - act * h) * slope)
    return {"dz": dz, "act": act, "dbias": column_sums(dz)}
