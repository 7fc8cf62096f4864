"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import Scalar
from primitives.device.mainloop import FusedGemm, arguments


class Step0_b4ca4189d664(FusedGemm):
    _epi_ops = (
        Scalar("s4"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        s4 = resources["s4"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n5_0 = (n3_0 * s4)
            n5_1 = (n3_1 * s4)
            accumulator[2 * i + 0] = n5_0
            accumulator[2 * i + 1] = n5_1
        return ()
