"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad
from primitives.device.lanes import Memory
from primitives.device.mainloop import FusedGemm, arguments
from primitives.device.tables import wrapped
from primitives.device.values import cosine_fast, sine_fast


class Step0_4699ece41648(FusedGemm):
    _epi_ops = (
        ColVecLoad("v6"),
        Memory("r9"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v6 = resources["v6"]
        r9 = resources["r9"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n9_0 = wrapped(place, r9, 2 * i, -1, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n10_0 = (v6[2 * i] * n9_0)
            n11_0 = cosine_fast(n10_0)
            n12_0 = (n3_0 * n11_0)
            n14_0 = sine_fast(n10_0)
            n15_0 = (n3_1 * n14_0)
            n16_0 = (n12_0 - n15_0)
            n17_0 = (n3_0 * n14_0)
            n18_0 = (n3_1 * n11_0)
            n19_0 = (n17_0 + n18_0)
            accumulator[2 * i + 0] = n16_0
            accumulator[2 * i + 1] = n19_0
        return ()
