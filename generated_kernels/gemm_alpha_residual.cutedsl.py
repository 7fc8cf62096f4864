"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import Scalar
from primitives.device.mainloop import FusedGemm, arguments


class Step0_425725107a54(FusedGemm):
    _epi_ops = (
        Scalar("s1"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        t0 = operand.to(Float32)
        s1 = resources["s1"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n5_0, n5_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (s1 * n5_0)
            n6_1 = (s1 * n5_1)
            n7_0 = (t0[2 * i + 0] + n6_0)
            n7_1 = (t0[2 * i + 1] + n6_1)
            accumulator[2 * i + 0] = n7_0
            accumulator[2 * i + 1] = n7_1
        return ()
