from primitives import gemm, join, kernel, pairs, per_row, row_sums, sigmoid


@kernel
def experts_backward(dy, w_down, offsets, routed, z):
    """Every value has its expert's rows, and the router's weight is one a row."""
    d = gemm(dy, w_down, offsets)
    gate, up = pairs(z)
    s = sigmoid(gate)
    plain = gate * s * up
    weighed = d * per_row(routed)
    dz = join(weighed * up * s * (1 + gate * (1 - s)), weighed * gate * s)
    return {"dz": dz, "act": plain * per_row(routed), "drouted": row_sums(d * plain)}
