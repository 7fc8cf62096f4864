"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, TileStore
from primitives.device.finish import BLOCK, LANES, finish_row
from primitives.device.grouped import Bounds, GroupedGemm
from primitives.device.mainloop import RowPartials, arguments, fragment, pack, unpack, wide_fragment
from primitives.device.values import sigmoid


class Step0_bc664c46e9ac(GroupedGemm):
    _epi_ops = (
        ColVecLoad("v7"),
        TileStore("o8"),
        RowPartials("p14_0", "add"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        t0 = unpack(operand, cutlass.BFloat16)
        v7 = resources["v7"]
        o8 = fragment(accumulator)
        w23 = wide_fragment(accumulator)
        p14_0 = resources["p14_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n2_0 = sigmoid(t0[4 * i + 0])
            n2_1 = sigmoid(t0[4 * i + 2])
            n3_0 = (t0[4 * i + 0] * n2_0)
            n3_1 = (t0[4 * i + 2] * n2_1)
            n5_0 = (n3_0 * t0[4 * i + 1])
            n5_1 = (n3_1 * t0[4 * i + 3])
            n8_0 = (n5_0 * v7[2 * i])
            n8_1 = (n5_1 * v7[2 * i])
            n12_0, n12_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n13_0 = (n12_0 * n5_0)
            n13_1 = (n12_1 * n5_1)
            n15_0 = (n12_0 * v7[2 * i])
            n15_1 = (n12_1 * v7[2 * i])
            n16_0 = (n15_0 * t0[4 * i + 1])
            n16_1 = (n15_1 * t0[4 * i + 3])
            n18_0 = (1.0 - n2_0)
            n18_1 = (1.0 - n2_1)
            n19_0 = (n3_0 * n18_0)
            n19_1 = (n3_1 * n18_1)
            n20_0 = (n2_0 + n19_0)
            n20_1 = (n2_1 + n19_1)
            n21_0 = (n16_0 * n20_0)
            n21_1 = (n16_1 * n20_1)
            n22_0 = (n15_0 * n3_0)
            n22_1 = (n15_1 * n3_1)
            o8[2 * i + 0] = n8_0
            o8[2 * i + 1] = n8_1
            w23[4 * i + 0] = n21_0
            w23[4 * i + 1] = n22_0
            w23[4 * i + 2] = n21_1
            w23[4 * i + 3] = n22_1
            p14_0[2 * i] = p14_0[2 * i] + (n13_0 + n13_1)
        pack(w23, cutlass.BFloat16, accumulator)
        return (o8, )


class Bounds11_bc664c46e9ac(Bounds):
    pass


class Finish1_14_bc664c46e9ac:
    @cute.jit
    def __call__(self, p14_0, o14, stream):
        blocks = cute.ceil_div(o14.shape[0] * LANES, BLOCK)
        launched = self.kernel(p14_0, o14)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p14_0, o14):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o14.shape[0] - 1)
        # It starts before its predecessor ends, and waits for that here: nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        n14 = finish_row(p14_0, at, lane, "add")
        if thread == at * LANES:
            o14[at] = (n14).to(o14.element_type)
