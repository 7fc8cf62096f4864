"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import RowVecLoad, TileStore
from primitives.device.finish import BLOCK, LANES, finish_row
from primitives.device.mainloop import FusedGemm, RowPartials, arguments, fragment


class Step0_6614ab4d5642(FusedGemm):
    _epi_ops = (
        RowVecLoad("v7"),
        TileStore("o8"),
        RowPartials("p10_0", "add"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        t4 = operand.to(Float32)
        v7 = resources["v7"]
        o8 = fragment(accumulator)
        p10_0 = resources["p10_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n5_0 = (n3_0 + t4[2 * i + 0])
            n5_1 = (n3_1 + t4[2 * i + 1])
            n8_0 = (n5_0 * v7[2 * i])
            n8_1 = (n5_1 * v7[2 * i + 1])
            n9_0 = (n5_0 * n5_0)
            n9_1 = (n5_1 * n5_1)
            accumulator[2 * i + 0] = n5_0
            accumulator[2 * i + 1] = n5_1
            o8[2 * i + 0] = n8_0
            o8[2 * i + 1] = n8_1
            p10_0[2 * i] = p10_0[2 * i] + (n9_0 + n9_1)
        return (o8, )


class Finish1_15_6614ab4d5642:
    @cute.jit
    def __call__(self, p10_0, s11, o15, stream):
        blocks = cute.ceil_div(o15.shape[0] * LANES, BLOCK)
        launched = self.kernel(p10_0, s11, o15)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p10_0, s11, o15):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o15.shape[0] - 1)
        # It starts before its predecessor ends, and waits for that here: nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        n11 = s11
        n10 = finish_row(p10_0, at, lane, "add")
        n12 = (n10 / n11)
        n14 = (n12 + Float32(1e-06))
        n15 = cute.math.rsqrt(n14, fastmath=True)
        if thread == at * LANES:
            o15[at] = (n15).to(o15.element_type)
