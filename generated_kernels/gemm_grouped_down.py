from primitives import gemm, kernel, per_row


@kernel
def gemm_grouped_down(act, w, offsets, routed):
    """One step: the grouped product, its rows scaled by the router's weights in the epilogue."""
    return {"y": gemm(act, w.mT, offsets) * per_row(routed)}
