from primitives import gemm, kernel, per_row


@kernel
def grouped_down(act, w, offsets, routed):
    return {"y": gemm(act, w.mT, offsets) * per_row(routed)}
