from primitives import gemm, kernel


@kernel
def gemm_grad_accumulate(dy, x, dw):
    """One step: the gradient's accumulator, summed over tokens, is added to the fp32 buffer in the epilogue."""
    return {"dw_new": dw + gemm(dy.mT, x)}
