"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, Scalar
from primitives.device.heads import HeadSums, at_subtile, statistic
from primitives.device.lanes import Memory, column
from primitives.device.mainloop import arguments, fold, fragment
from primitives.device.ranges import Range, RangeStore, within
from primitives.device.tables import HeadTable, TableGemm, table, tabled, wrapped
from primitives.device.values import choose


class Step0_2534c33fc7f3(TableGemm):
    _epi_ops = (
        ColVecLoad("v5"),
        Memory("r21"),
        Memory("r23"),
        HeadTable("r28"),
        Scalar("s11"),
        Scalar("s14"),
        HeadSums("h9"),
        RangeStore("o40", "o41", "o42"),
        Range("o41"),
        Range("o42"),
    )
    EpilogueArguments = arguments(_epi_ops)

    epi_needs_acc_prepass = True

    @cute.jit
    def epi_prepass_subtile(self, params, states, accumulator, at, number):
        v5 = at_subtile(self, "v5", states, at)
        s11 = states["s11"]
        s14 = states["s14"]
        f9 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            n8_0 = (n6_0 * n6_0)
            n8_1 = (n6_1 * n6_1)
            f9[2 * i + 0] = n8_0
            f9[2 * i + 1] = n8_1
        fold(self, "h9", at_subtile(self, "h9", states, at), f9)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        r21 = resources["r21"]
        r23 = resources["r23"]
        r28 = table(resources["r28"])
        s11 = resources["s11"]
        s14 = resources["s14"]
        h9 = statistic(self, "h9", resources["h9"])
        o40 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n21_0 = wrapped(place, r21, 2 * i + 0, 0, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n21_1 = wrapped(place, r21, 2 * i + 1, 0, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n23_0 = wrapped(place, r23, 2 * i + 0, 0, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n23_1 = wrapped(place, r23, 2 * i + 1, 0, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n28_0 = tabled(place, r28, 2 * i + 0, 0, 0, self.head_widths[0])
            n28_1 = tabled(place, r28, 2 * i + 1, 0, 0, self.head_widths[0])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            n7_0 = choose(within(column(place, 2 * i + 0, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n7_1 = choose(within(column(place, 2 * i + 1, 0, 0), self.column_bounds[0]), 1.0, 0.0)
            n12_0 = (Float32(2.0) * Float32(s11))
            n13_0 = (h9[2 * i] / n12_0)
            n15_0 = (n13_0 + s14)
            n16_0 = cute.math.rsqrt(n15_0, fastmath=True)
            n18_0 = (n6_0 * n16_0)
            n18_1 = (n6_1 * n16_0)
            n19_0 = choose(within(column(place, 2 * i + 0, 0, 0), self.column_bounds[1]), 1.0, 0.0)
            n19_1 = choose(within(column(place, 2 * i + 1, 0, 0), self.column_bounds[1]), 1.0, 0.0)
            n24_0 = choose(n19_0 != 0.0, n21_0, n23_0)
            n24_1 = choose(n19_1 != 0.0, n21_1, n23_1)
            n25_0 = (n18_0 * n24_0)
            n25_1 = (n18_1 * n24_1)
            n30_0 = (n25_0 * n28_0)
            n33_0 = (n25_1 * n28_1)
            n34_0 = (n30_0 - n33_0)
            n35_0 = (n25_0 * n28_1)
            n36_0 = (n25_1 * n28_0)
            n37_0 = (n35_0 + n36_0)
            n39_0 = choose(n7_0 != 0.0, n6_0, n34_0)
            n39_1 = choose(n7_1 != 0.0, n6_1, n37_0)
            o40[2 * i + 0] = n39_0
            o40[2 * i + 1] = n39_1
        return (o40, )
