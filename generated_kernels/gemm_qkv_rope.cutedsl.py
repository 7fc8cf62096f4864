"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from primitives.device.lanes import column
from primitives.device.mainloop import arguments, fragment
from primitives.device.ranges import Range, RangeStore, within
from primitives.device.tables import HeadTable, TableGemm, table, tabled
from primitives.device.values import choose


class Step0_5dd7b490385d(TableGemm):
    _epi_ops = (
        HeadTable("r7"),
        RangeStore("o19", "o20", "o21"),
        Range("o20"),
        Range("o21"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        r7 = table(resources["r7"])
        o19 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n7_0 = tabled(place, r7, 2 * i + 0, 0, 0, self.head_widths[0])
            n7_1 = tabled(place, r7, 2 * i + 1, 0, 0, self.head_widths[0])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n4_0 = choose(within(column(place, 2 * i + 0, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n4_1 = choose(within(column(place, 2 * i + 1, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n9_0 = (n3_0 * n7_0)
            n12_0 = (n3_1 * n7_1)
            n13_0 = (n9_0 - n12_0)
            n14_0 = (n3_0 * n7_1)
            n15_0 = (n3_1 * n7_0)
            n16_0 = (n14_0 + n15_0)
            n18_0 = choose(n4_0 != 0.0, n3_0, n13_0)
            n18_1 = choose(n4_1 != 0.0, n3_1, n16_0)
            o19[2 * i + 0] = n18_0
            o19[2 * i + 1] = n18_1
        return (o19, )
