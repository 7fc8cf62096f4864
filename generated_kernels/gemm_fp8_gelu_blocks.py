from primitives import gelu, gemm, head_abs_max, kernel, maximum, per_column, per_head, per_row


@kernel
def gemm_fp8_gelu_blocks(x, w, sx, sw, least):
    """One step: dequantise, GELU, and each block's largest magnitude, which scales the fp8 output at once."""
    z = gemm(x, w.mT) * per_row(sx) * per_column(sw)
    h = gelu(z)
    scale = maximum(head_abs_max(h, 128), least) / 448
    return {"act": h * per_head(1 / scale), "scale": scale}
