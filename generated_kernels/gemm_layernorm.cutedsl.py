"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from primitives.device.mainloop import FusedGemm, arguments


class Step0_861db0a66044(FusedGemm):
    _epi_ops = (
        ColVecLoad("v5"),
        RowVecLoad("v7"),
        ColVecLoad("v11"),
        RowVecLoad("v14"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        v7 = resources["v7"]
        v11 = resources["v11"]
        v14 = resources["v14"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n8_0 = (v5[2 * i] * v7[2 * i])
            n8_1 = (v5[2 * i] * v7[2 * i + 1])
            n9_0 = (n3_0 - n8_0)
            n9_1 = (n3_1 - n8_1)
            n12_0 = (n9_0 * v11[2 * i])
            n12_1 = (n9_1 * v11[2 * i])
            n15_0 = (n12_0 + v14[2 * i])
            n15_1 = (n12_1 + v14[2 * i + 1])
            accumulator[2 * i + 0] = n15_0
            accumulator[2 * i + 1] = n15_1
        return ()
