"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, ColVecSelect, OnlineLSEReduce
from primitives.device.finish import BLOCK, LANES, finish_logsumexp, finish_select
from primitives.device.mainloop import FusedGemm, arguments, fold, fragment
from primitives.device.values import LOWEST


class Step0_cde65daaf06d(FusedGemm):
    _epi_ops = (
        OnlineLSEReduce("p4_0"),
        ColVecLoad("i6"),
        ColVecSelect("p6_0", ColVecLoad("i6")),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        f3_0 = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            accumulator[2 * i + 0] = n3_0
            accumulator[2 * i + 1] = n3_1
            f3_0[2 * i], f3_0[2 * i + 1] = n3_0, n3_1
        fold(self, "p6_0", resources["p6_0"], f3_0)
        fold(self, "p4_0", resources["p4_0"], f3_0)
        return ()


class Finish1_4_cde65daaf06d:
    @cute.jit
    def __call__(self, p4_0, p6_0, v5, e6, o4, o6, stream):
        blocks = cute.ceil_div(o4.shape[0] * LANES, BLOCK)
        launched = self.kernel(p4_0, p6_0, v5, e6, o4, o6)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p4_0, p6_0, v5, e6, o4, o6):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o4.shape[0] - 1)
        # It starts before its predecessor ends, and waits for that here: nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        n5 = v5[at].to(Float32)
        n4 = finish_logsumexp(p4_0, at, lane)
        n6 = finish_select(p6_0, at, n5, e6)
        if thread == at * LANES:
            o4[at] = (n4).to(o4.element_type)
            o6[at] = (n6).to(o6.element_type)
            p6_0[at] = Float32(LOWEST)  # what it holds where nothing is selected
