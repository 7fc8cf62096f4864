"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import TileStore
from primitives.device.gathered import GatheredGemm
from primitives.device.grouped import Bounds
from primitives.device.mainloop import arguments, half_fragment
from primitives.device.values import sigmoid_fast


class Step0_21c91cc52731(GatheredGemm):
    _epi_ops = (
        TileStore("o9", gated=True),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        o9 = half_fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n5_0, n5_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n7_0 = (n5_0 * sigmoid_fast(n5_0))
            n9_0 = (n7_0 * n5_1)
            accumulator[2 * i + 0] = n5_0
            accumulator[2 * i + 1] = n5_1
            o9[i] = n9_0
        return (o9, )


class Bounds3_21c91cc52731(Bounds):
    pass
