"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, ColVecSelect, OnlineLSEReduce
from primitives.device.finish import BLOCK, LANES, finish_logsumexp, finish_select
from primitives.device.mainloop import FusedGemm, arguments, fold, fragment
from primitives.device.values import LOWEST


class Step0_21a0b13f5eda(FusedGemm):
    _epi_ops = (
        ColVecLoad("v5"),
        OnlineLSEReduce("p7_0"),
        ColVecLoad("i9"),
        ColVecSelect("p9_0", ColVecLoad("i9")),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        v5 = resources["v5"]
        f6_0 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n6_0 = (n3_0 * v5[2 * i])
            n6_1 = (n3_1 * v5[2 * i])
            accumulator[2 * i + 0] = n6_0
            accumulator[2 * i + 1] = n6_1
            f6_0[2 * i], f6_0[2 * i + 1] = n6_0, n6_1
        fold(self, "p9_0", resources["p9_0"], f6_0)
        fold(self, "p7_0", resources["p7_0"], f6_0)
        return ()


class Finish1_7_21a0b13f5eda:
    @cute.jit
    def __call__(self, p7_0, p9_0, v8, e9, o7, o9, stream):
        blocks = cute.ceil_div(o7.shape[0] * LANES, BLOCK)
        launched = self.kernel(p7_0, p9_0, v8, e9, o7, o9)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p7_0, p9_0, v8, e9, o7, o9):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o7.shape[0] - 1)
        # It starts before its predecessor ends, and waits for that here: nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        n8 = v8[at].to(Float32)
        n7 = finish_logsumexp(p7_0, at, lane)
        n9 = finish_select(p9_0, at, n8, e9)
        if thread == at * LANES:
            o7[at] = (n7).to(o7.element_type)
            o9[at] = (n9).to(o9.element_type)
            p9_0[at] = Float32(LOWEST)  # what it holds where nothing is selected
