"""The finishing kernel is launched early (PDL), does all that needs no partials before its wait, and after it reads a row in one round of 16-byte loads and multiplies by a reciprocal made beforehand."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import RowVecLoad, TileStore
from primitives.device.finish import BLOCK, LANES
from primitives.device.mainloop import FusedGemm, RowPartials, arguments, fragment


class Step0(FusedGemm):
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


class Finish1_15:
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
        # The reciprocal of the width, with one Newton step: exact where the width is a power of two.
        n11 = Float32(s11)
        rough = cute.arch.rcp_approx(n11)
        share = rough + rough * (1.0 - n11 * rough)
        row = p10_0[0, at, None]
        tiles = p10_0.shape[2]
        quads = tiles // 4
        pitch = cute.crd2idx((0, 1, 0), p10_0.layout)
        whole = (tiles % 4 == 0) & (pitch % 4 == 0)
        near = cute.make_rmem_tensor(4, Float32)
        far = cute.make_rmem_tensor(4, Float32)
        total = Float32(0.0)
        # Nothing above touches memory.
        cute.arch.griddepcontrol_wait()
        if whole:
            # Both loads are on their way before either is used; one trip is enough for 64 tiles.
            for k in cutlass.range(lane, quads, 2 * LANES, unroll=1):
                far.fill(0.0)
                cute.autovec_copy(
                    cute.make_tensor((row.iterator + 4 * k).align(16), cute.make_layout(4)), near)
                if k + LANES < quads:
                    cute.autovec_copy(
                        cute.make_tensor((row.iterator + 4 * (k + LANES)).align(16), cute.make_layout(4)), far)
                total = total + (((near[0] + far[0]) + (near[1] + far[1]))
                                 + ((near[2] + far[2]) + (near[3] + far[3])))
        else:
            for tile in cutlass.range(lane, tiles, LANES, unroll=4):
                total = total + row[tile]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=4)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        n14 = total * share + Float32(1e-06)
        n15 = cute.math.rsqrt(n14, fastmath=True)
        if thread == at * LANES:
            o15[at] = (n15).to(o15.element_type)
