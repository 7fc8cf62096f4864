"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import TileStore
from primitives.device.mainloop import FusedGemm, arguments, fragment


class Step0_091effbb1fb3(FusedGemm):
    _epi_ops = (
        TileStore("o6"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        o6 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n5_0 = cute.arch.fmax(n3_0, 0.0)
            n5_1 = cute.arch.fmax(n3_1, 0.0)
            n6_0 = (n5_0 * n5_0)
            n6_1 = (n5_1 * n5_1)
            accumulator[2 * i + 0] = n3_0
            accumulator[2 * i + 1] = n3_1
            o6[2 * i + 0] = n6_0
            o6[2 * i + 1] = n6_1
        return (o6, )
