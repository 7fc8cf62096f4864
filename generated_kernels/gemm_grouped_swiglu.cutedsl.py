"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import TileStore
from primitives.device.grouped import Bounds, GroupedGemm
from primitives.device.mainloop import arguments, half_fragment
from primitives.device.values import sigmoid_fast


class Step0_82087ba1717b(GroupedGemm):
    _epi_ops = (
        TileStore("o8", gated=True),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        o8 = half_fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n4_0, n4_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n4_0 * sigmoid_fast(n4_0))
            n8_0 = (n6_0 * n4_1)
            accumulator[2 * i + 0] = n4_0
            accumulator[2 * i + 1] = n4_1
            o8[i] = n8_0
        return (o8, )


class Bounds3_82087ba1717b(Bounds):
    pass
