"""Chain the finishing kernel to the GEMM by programmatic launch, signalled at each CTA's first tile so that its blocks are parked before the GEMM ends, and read both partials of a row in one batch of independent loads."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import RowVecLoad, TileStore
from primitives.device.finish import BLOCK, LANES
from primitives.device.mainloop import FusedGemm, RowPartials, arguments, fragment
from primitives.device.values import choose


class Step0(FusedGemm):
    _epi_ops = (
        RowVecLoad("v7"),
        TileStore("o8"),
        RowPartials("p9_0", "add"),
        RowPartials("p13_0", "add"),
    )
    EpilogueArguments = arguments(_epi_ops)

    def epi_visit_acc(self, params, acc, tiled_mma, tile_coord_mnkl, tidx):
        # Lets the finishing kernel be scheduled wherever a CTA has ended. It waits there for the end of
        # this whole grid (griddepcontrol_wait) before it touches memory. Repeating the signal does nothing.
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        place = resources["place"]
        t4 = operand.to(Float32)
        v7 = resources["v7"]
        o8 = fragment(accumulator)
        p9_0 = resources["p9_0"]
        p13_0 = resources["p13_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n3_0, n3_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n5_0 = (n3_0 + t4[2 * i + 0])
            n5_1 = (n3_1 + t4[2 * i + 1])
            n8_0 = (n5_0 * v7[2 * i])
            n8_1 = (n5_1 * v7[2 * i + 1])
            n12_0 = (n5_0 * n5_0)
            n12_1 = (n5_1 * n5_1)
            accumulator[2 * i + 0] = n5_0
            accumulator[2 * i + 1] = n5_1
            o8[2 * i + 0] = n8_0
            o8[2 * i + 1] = n8_1
            p9_0[2 * i] = p9_0[2 * i] + (n5_0 + n5_1)
            p13_0[2 * i] = p13_0[2 * i] + (n12_0 + n12_1)
        return (o8, )


class Finish1_11:
    @cute.jit
    def __call__(self, p9_0, s10, p13_0, o11, o19, stream):
        blocks = cute.ceil_div(o11.shape[0] * LANES, BLOCK)
        launched = self.kernel(p9_0, s10, p13_0, o11, o19)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p9_0, s10, p13_0, o11, o19):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % LANES
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // LANES, o11.shape[0] - 1)
        tiles = p9_0.shape[2]
        last = tiles - 1
        n10 = s10
        n9 = Float32(0.0)
        n13 = Float32(0.0)
        # Every thread, before any memory: the GEMM has ended and its partials are visible.
        cute.arch.griddepcontrol_wait()
        for start in cutlass.range(lane, tiles, 4 * LANES):
            # Four partials of each sum at once, clamped, so that all eight loads are in flight together.
            second = start + LANES
            third = start + 2 * LANES
            fourth = start + 3 * LANES
            second_at = cutlass.min(second, last)
            third_at = cutlass.min(third, last)
            fourth_at = cutlass.min(fourth, last)
            a0 = p9_0[0, at, start]
            a1 = p9_0[0, at, second_at]
            a2 = p9_0[0, at, third_at]
            a3 = p9_0[0, at, fourth_at]
            b0 = p13_0[0, at, start]
            b1 = p13_0[0, at, second_at]
            b2 = p13_0[0, at, third_at]
            b3 = p13_0[0, at, fourth_at]
            a1 = choose(second < tiles, a1, 0.0)
            a2 = choose(third < tiles, a2, 0.0)
            a3 = choose(fourth < tiles, a3, 0.0)
            b1 = choose(second < tiles, b1, 0.0)
            b2 = choose(third < tiles, b2, 0.0)
            b3 = choose(fourth < tiles, b3, 0.0)
            n9 = n9 + ((a0 + a1) + (a2 + a3))
            n13 = n13 + ((b0 + b1) + (b2 + b3))
        for k in cutlass.range_constexpr(3):
            n9 = n9 + cute.arch.shuffle_sync_bfly(n9, offset=LANES >> (k + 1))
            n13 = n13 + cute.arch.shuffle_sync_bfly(n13, offset=LANES >> (k + 1))
        n11 = (n9 / n10)
        n14 = (n13 / n10)
        n15 = (n11 * n11)
        n16 = (n14 - n15)
        n18 = (n16 + Float32(1e-05))
        n19 = cute.math.rsqrt(n18, fastmath=True)
        if thread == at * LANES:
            o11[at] = (n11).to(o11.element_type)
            o19[at] = (n19).to(o19.element_type)
