from primitives import gemm, kernel, pairs, per_column, per_row, row_abs_max, silu


@kernel
def gemm_fp8_swiglu(x, w, sx, sw, scale):
    """One step: dequantise the fp8 product by its row and column scales, SwiGLU, and quantise by the delayed scale."""
    z = gemm(x, w.mT) * per_row(sx) * per_column(sw)
    gate, up = pairs(z)
    h = silu(gate) * up
    return {"act": h * scale, "amax": row_abs_max(h)}
