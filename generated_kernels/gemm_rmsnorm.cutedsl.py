"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad
from primitives.device.mainloop import FusedGemm, arguments


class Step0_2f6ad434f27d(FusedGemm):
    _epi_ops = (
        ColVecLoad("v5"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            accumulator[2 * i + 0] = n6_0
            accumulator[2 * i + 1] = n6_1
        return ()
