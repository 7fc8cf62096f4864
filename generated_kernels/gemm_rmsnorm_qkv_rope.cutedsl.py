"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad
from primitives.device.lanes import column
from primitives.device.mainloop import arguments, fragment
from primitives.device.ranges import Range, RangeStore, within
from primitives.device.tables import HeadTable, TableGemm, table, tabled
from primitives.device.values import choose


class Step0_c8baf291bca8(TableGemm):
    _epi_ops = (
        ColVecLoad("v5"),
        HeadTable("r10"),
        RangeStore("o22", "o23", "o24"),
        Range("o23"),
        Range("o24"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        r10 = table(resources["r10"])
        o22 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n10_0 = tabled(place, r10, 2 * i + 0, 0, 0, self.head_widths[0])
            n10_1 = tabled(place, r10, 2 * i + 1, 0, 0, self.head_widths[0])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            n7_0 = choose(within(column(place, 2 * i + 0, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n7_1 = choose(within(column(place, 2 * i + 1, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n12_0 = (n6_0 * n10_0)
            n15_0 = (n6_1 * n10_1)
            n16_0 = (n12_0 - n15_0)
            n17_0 = (n6_0 * n10_1)
            n18_0 = (n6_1 * n10_0)
            n19_0 = (n17_0 + n18_0)
            n21_0 = choose(n7_0 != 0.0, n16_0, n6_0)
            n21_1 = choose(n7_1 != 0.0, n19_0, n6_1)
            o22[2 * i + 0] = n21_0
            o22[2 * i + 1] = n21_1
        return (o22, )
