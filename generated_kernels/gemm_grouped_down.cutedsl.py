"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad
from primitives.device.grouped import Bounds, GroupedGemm
from primitives.device.mainloop import arguments


class Step0_bfa55735f6f9(GroupedGemm):
    _epi_ops = (
        ColVecLoad("v6"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v6 = resources["v6"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n4_0, n4_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n7_0 = (n4_0 * v6[2 * i])
            n7_1 = (n4_1 * v6[2 * i])
            accumulator[2 * i + 0] = n7_0
            accumulator[2 * i + 1] = n7_1
        return ()


class Bounds3_bfa55735f6f9(Bounds):
    pass
