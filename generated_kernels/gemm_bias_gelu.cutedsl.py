"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import RowVecLoad, TileStore
from primitives.device.mainloop import FusedGemm, arguments, fragment
from primitives.device.values import gelu_fast


class Step0_c0c72f4b1297(FusedGemm):
    _epi_ops = (
        RowVecLoad("v5"),
        TileStore("o7"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        o7 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 + v5[2 * i])
            n6_1 = (n3_1 + v5[2 * i + 1])
            n7_0 = gelu_fast(n6_0)
            n7_1 = gelu_fast(n6_1)
            accumulator[2 * i + 0] = n6_0
            accumulator[2 * i + 1] = n6_1
            o7[2 * i + 0] = n7_0
            o7[2 * i + 1] = n7_1
        return (o7, )
