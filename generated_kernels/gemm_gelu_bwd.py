from primitives import column_sums, gemm, kernel, sigmoid


@kernel
def gemm_gelu_bwd(dy, w_down, z, c, a):
    """One step: GELU in its tanh form is z * sigmoid(g); one sigmoid serves it and its derivative."""
    linear = 2 * c
    cubic = linear * a
    square = z * z
    s = sigmoid(z * (linear + cubic * square))
    act = z * s
    slope = s + act * (1 - s) * (linear + 3 * cubic * square)
    dz = gemm(dy, w_down) * slope
    return {"dz": dz, "act": act, "dbias": column_sums(dz)}
