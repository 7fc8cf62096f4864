"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, RowVecLoad, TileLoad
from primitives.device.finish import BLOCK, LANES, finish_column
from primitives.device.lanes import inside_rows
from primitives.device.mainloop import ColumnPartials, FusedGemm, arguments
from primitives.device.values import choose


class Step0_993b5fbe4aac(FusedGemm):
    _epi_ops = (
        TileLoad("t9"),
        ColVecLoad("v5"),
        RowVecLoad("v11"),
        ColVecLoad("v14"),
        ColumnPartials("p8_0", "add"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        t3 = operand.to(Float32)
        t9 = resources["t9"].to(Float32)
        v5 = resources["v5"]
        v11 = resources["v11"]
        v14 = resources["v14"]
        p8_0 = resources["p8_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n2_0, n2_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (t3[2 * i + 0] * v5[2 * i])
            n6_1 = (t3[2 * i + 1] * v5[2 * i])
            n7_0 = (n2_0 * n6_0)
            n7_1 = (n2_1 * n6_1)
            n12_0 = (n2_0 * v11[2 * i])
            n12_1 = (n2_1 * v11[2 * i + 1])
            n15_0 = (n6_0 * v14[2 * i])
            n15_1 = (n6_1 * v14[2 * i])
            n16_0 = (n12_0 - n15_0)
            n16_1 = (n12_1 - n15_1)
            n17_0 = (v5[2 * i] * n16_0)
            n17_1 = (v5[2 * i] * n16_1)
            n18_0 = (t9[2 * i + 0] + n17_0)
            n18_1 = (t9[2 * i + 1] + n17_1)
            accumulator[2 * i + 0] = n18_0
            accumulator[2 * i + 1] = n18_1
            p8_0[2 * i + 0] = p8_0[2 * i + 0] + (choose(inside_rows(place, 2 * i + 0), n7_0, 0.0))
            p8_0[2 * i + 1] = p8_0[2 * i + 1] + (choose(inside_rows(place, 2 * i + 1), n7_1, 0.0))
        return ()


class Step1_993b5fbe4aac(FusedGemm):
    _epi_ops = (
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n20_0, n20_1 = accumulator[2 * i], accumulator[2 * i + 1]
            accumulator[2 * i + 0] = n20_0
            accumulator[2 * i + 1] = n20_1
        return ()


class Finish1_8_993b5fbe4aac:
    @cute.jit
    def __call__(self, p8_0, o8, stream):
        blocks = cute.ceil_div(o8.shape[0] * LANES, BLOCK)
        launched = self.kernel(p8_0, o8)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p8_0, o8):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o8.shape[0] - 1)
        # It starts before its predecessor ends, and waits for that here: nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        n8 = finish_column((p8_0, ), at, lane, "add", False)
        if thread == at * LANES:
            o8[at] = (n8).to(o8.element_type)
