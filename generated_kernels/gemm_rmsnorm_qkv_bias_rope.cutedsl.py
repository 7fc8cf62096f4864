"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from primitives.device.lanes import column
from primitives.device.mainloop import arguments, fragment
from primitives.device.ranges import Range, RangeStore, within
from primitives.device.tables import HeadTable, TableGemm, table, tabled
from primitives.device.values import choose


class Step0_e7a0c8a3322d(TableGemm):
    _epi_ops = (
        ColVecLoad("v5"),
        RowVecLoad("v8"),
        HeadTable("r13"),
        RangeStore("o25", "o26", "o27"),
        Range("o26"),
        Range("o27"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        v8 = resources["v8"]
        r13 = table(resources["r13"])
        o25 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n13_0 = tabled(place, r13, 2 * i + 0, 0, 0, self.head_widths[0])
            n13_1 = tabled(place, r13, 2 * i + 1, 0, 0, self.head_widths[0])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            n9_0 = (n6_0 + v8[2 * i])
            n9_1 = (n6_1 + v8[2 * i + 1])
            n10_0 = choose(within(column(place, 2 * i + 0, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n10_1 = choose(within(column(place, 2 * i + 1, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n15_0 = (n9_0 * n13_0)
            n18_0 = (n9_1 * n13_1)
            n19_0 = (n15_0 - n18_0)
            n20_0 = (n9_0 * n13_1)
            n21_0 = (n9_1 * n13_0)
            n22_0 = (n20_0 + n21_0)
            n24_0 = choose(n10_0 != 0.0, n19_0, n9_0)
            n24_1 = choose(n10_1 != 0.0, n22_0, n9_1)
            o25[2 * i + 0] = n24_0
            o25[2 * i + 1] = n24_1
        return (o25, )
