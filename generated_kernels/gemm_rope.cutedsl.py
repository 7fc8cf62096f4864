"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from primitives.device.mainloop import arguments
from primitives.device.tables import HeadTable, TableGemm, table, tabled


class Step0_d5cbd84290fb(TableGemm):
    _epi_ops = (
        HeadTable("r6"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        r6 = table(resources["r6"])
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n6_0 = tabled(place, r6, 2 * i + 0, 0, 0, self.head_widths[0])
            n6_1 = tabled(place, r6, 2 * i + 1, 0, 0, self.head_widths[0])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n8_0 = (n3_0 * n6_0)
            n11_0 = (n3_1 * n6_1)
            n12_0 = (n8_0 - n11_0)
            n13_0 = (n3_0 * n6_1)
            n14_0 = (n3_1 * n6_0)
            n15_0 = (n13_0 + n14_0)
            accumulator[2 * i + 0] = n12_0
            accumulator[2 * i + 1] = n15_0
        return ()
