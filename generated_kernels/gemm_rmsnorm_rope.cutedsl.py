"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad
from primitives.device.mainloop import arguments
from primitives.device.tables import HeadTable, TableGemm, table, tabled


class Step0_428ac09b49d2(TableGemm):
    _epi_ops = (
        ColVecLoad("v5"),
        HeadTable("r9"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        r9 = table(resources["r9"])
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n9_0 = tabled(place, r9, 2 * i + 0, 0, 0, self.head_widths[0])
            n9_1 = tabled(place, r9, 2 * i + 1, 0, 0, self.head_widths[0])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            n11_0 = (n6_0 * n9_0)
            n14_0 = (n6_1 * n9_1)
            n15_0 = (n11_0 - n14_0)
            n16_0 = (n6_0 * n9_1)
            n17_0 = (n6_1 * n9_0)
            n18_0 = (n16_0 + n17_0)
            accumulator[2 * i + 0] = n15_0
            accumulator[2 * i + 1] = n18_0
        return ()
