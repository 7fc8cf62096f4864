from primitives import gemm, join, kernel, pairs, per_row, row_sums, sigmoid


@kernel
def gemm_grouped_swiglu_bwd(dy, w_down, offsets, routed, z):
    """One step: the gradients, the weighed activation and the row sums share one sigmoid in the epilogue."""
    d = gemm(dy, w_down, offsets)
    gate, up = pairs(z)
    weight = per_row(routed)
    s = sigmoid(gate)
    a = gate * s
    plain = a * up
    weighed = d * weight
    dgate = weighed * up * (s + a * (1 - s))
    dup = weighed * a
    return {"dz": join(dgate, dup), "act": plain * weight, "drouted": row_sums(d * plain)}
