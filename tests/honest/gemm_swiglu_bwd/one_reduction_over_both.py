"""s as the row sums of dz * z over the whole width, and the gate's derivative with sig taken out."""

from primitives import gemm, join, kernel, pairs, row_sums, sigmoid


@kernel
def whole(dy, w_down, z):
    d, (gate, up) = gemm(dy, w_down), pairs(z)
    sig = sigmoid(gate)
    dz = join(d * sig * up * (1 + gate * (1 - sig)), d * sig * gate)
    return {"s": row_sums(dz * z), "dz": dz, "act": sig * gate * up}
