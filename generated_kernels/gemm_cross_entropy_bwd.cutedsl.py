"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad
from primitives.device.lanes import column
from primitives.device.mainloop import FusedGemm, arguments
from primitives.device.values import choose


class Step0_5e91ecd686b4(FusedGemm):
    _epi_ops = (
        ColVecLoad("v6"),
        ColVecLoad("v9"),
        ColVecLoad("v16"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v6 = resources["v6"]
        v9 = resources["v9"]
        v16 = resources["v16"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n4_0 = Float32(column(place, 2 * i + 0, 0, 0))
            n4_1 = Float32(column(place, 2 * i + 1, 0, 0))
            n7_0 = choose(n4_0 == v6[2 * i], 1.0, 0.0)
            n7_1 = choose(n4_1 == v6[2 * i], 1.0, 0.0)
            n10_0 = (n3_0 - v9[2 * i])
            n10_1 = (n3_1 - v9[2 * i])
            n11_0 = cute.math.exp(n10_0, fastmath=True)
            n11_1 = cute.math.exp(n10_1, fastmath=True)
            n13_0 = (n11_0 - 1.0)
            n13_1 = (n11_1 - 1.0)
            n14_0 = choose(n7_0 != 0.0, n13_0, n11_0)
            n14_1 = choose(n7_1 != 0.0, n13_1, n11_1)
            n17_0 = (n14_0 * v16[2 * i])
            n17_1 = (n14_1 * v16[2 * i])
            accumulator[2 * i + 0] = n17_0
            accumulator[2 * i + 1] = n17_1
        return ()
