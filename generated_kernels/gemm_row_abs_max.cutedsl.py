"""Lowered by coda-agent from a program: do not edit, lower again."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from primitives.device.finish import BLOCK, LANES, finish_row
from primitives.device.mainloop import FusedGemm, RowPartials, arguments
from primitives.device.values import largest, magnitude


class Step0_60def6a285de(FusedGemm):
    _epi_ops = (
        RowPartials("p4_0", "max_abs"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        p4_0 = resources["p4_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            accumulator[2 * i + 0] = n3_0
            accumulator[2 * i + 1] = n3_1
            p4_0[2 * i] = largest(largest(p4_0[2 * i], magnitude(n3_0)), magnitude(n3_1))
        return ()


class Finish1_4_60def6a285de:
    @cute.jit
    def __call__(self, p4_0, o4, stream):
        blocks = cute.ceil_div(o4.shape[0] * LANES, BLOCK)
        launched = self.kernel(p4_0, o4)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p4_0, o4):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o4.shape[0] - 1)
        # It starts before its predecessor ends, and waits for that here: nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        n4 = finish_row(p4_0, at, lane, "max_abs")
        if thread == at * LANES:
            o4[at] = (n4).to(o4.element_type)
