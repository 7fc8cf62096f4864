"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, Scalar
from primitives.device.heads import HeadSums, at_subtile, statistic
from primitives.device.lanes import Memory, put_head
from primitives.device.mainloop import FusedGemm, arguments, fold, fragment
from primitives.device.tables import wrapped
from primitives.device.values import cosine_fast, sine_fast


class Step0_288750b7837d(FusedGemm):
    _epi_ops = (
        ColVecLoad("v20"),
        Memory("r16"),
        Memory("r23"),
        Scalar("s7"),
        Scalar("s10"),
        HeadSums("h5"),
        Memory("o12"),
    )
    EpilogueArguments = arguments(_epi_ops)

    epi_needs_acc_prepass = True

    @cute.jit
    def epi_prepass_subtile(self, params, states, accumulator, at, number):
        s7 = states["s7"]
        s10 = states["s10"]
        f5 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n4_0 = (n3_0 * n3_0)
            n4_1 = (n3_1 * n3_1)
            f5[2 * i + 0] = n4_0
            f5[2 * i + 1] = n4_1
        fold(self, "h5", at_subtile(self, "h5", states, at), f5)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v20 = resources["v20"]
        r16 = resources["r16"]
        r23 = resources["r23"]
        s7 = resources["s7"]
        s10 = resources["s10"]
        h5 = statistic(self, "h5", resources["h5"])
        o12 = resources["o12"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n16_0 = wrapped(place, r16, 2 * i + 0, 0, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n16_1 = wrapped(place, r16, 2 * i + 1, 0, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n23_0 = wrapped(place, r23, 2 * i, -1, 0, self.head_widths[0], self.cta_tile_shape_mnk[1])
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n8_0 = (Float32(2.0) * Float32(s7))
            n9_0 = (h5[2 * i] / n8_0)
            n11_0 = (n9_0 + s10)
            n12_0 = cute.math.rsqrt(n11_0, fastmath=True)
            n14_0 = (n3_0 * n12_0)
            n14_1 = (n3_1 * n12_0)
            n17_0 = (n14_0 * n16_0)
            n17_1 = (n14_1 * n16_1)
            n24_0 = (v20[2 * i] * n23_0)
            n25_0 = cosine_fast(n24_0)
            n26_0 = (n17_0 * n25_0)
            n28_0 = sine_fast(n24_0)
            n29_0 = (n17_1 * n28_0)
            n30_0 = (n26_0 - n29_0)
            n31_0 = (n17_0 * n28_0)
            n32_0 = (n17_1 * n25_0)
            n33_0 = (n31_0 + n32_0)
            put_head(place, o12, 2 * i, self.head_widths[0], n12_0)
            accumulator[2 * i + 0] = n30_0
            accumulator[2 * i + 1] = n33_0
        return ()
