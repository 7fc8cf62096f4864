"""Shorten what is exposed after the last product: the finishing kernel starts by PDL with all its loads in flight at once, and the epilogue folds its sums by FFMA into the running value."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import TileStore
from primitives.device.finish import BLOCK
from primitives.device.mainloop import FusedGemm, RowPartials, arguments, fragment, pack, unpack, wide_fragment
from primitives.device.values import choose, sigmoid

# Threads that finish one row, and independent loads of each in one round.
WIDTH = 16
BATCH = 6


class Step0(FusedGemm):
    _epi_ops = (
        TileStore("o5"),
        RowPartials("p20_0", "add"),
    )
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        t0 = unpack(operand, cutlass.BFloat16)
        o5 = fragment(accumulator)
        w16 = wide_fragment(accumulator)
        p20_0 = resources["p20_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            gate_0, up_0 = t0[4 * i + 0], t0[4 * i + 1]
            gate_1, up_1 = t0[4 * i + 2], t0[4 * i + 3]
            n8_0, n8_1 = accumulator[2 * i], accumulator[2 * i + 1]
            n2_0 = sigmoid(gate_0)
            n2_1 = sigmoid(gate_1)
            n3_0 = gate_0 * n2_0
            n3_1 = gate_1 * n2_1
            n5_0 = n3_0 * up_0
            n5_1 = n3_1 * up_1
            # gate * (1 - sig), then sig + sig * that.
            n12_0 = gate_0 - n3_0
            n12_1 = gate_1 - n3_1
            n13_0 = n2_0 + n2_0 * n12_0
            n13_1 = n2_1 + n2_1 * n12_1
            n14_0 = (n8_0 * up_0) * n13_0
            n14_1 = (n8_1 * up_1) * n13_1
            n15_0 = n8_0 * n3_0
            n15_1 = n8_1 * n3_1
            o5[2 * i + 0] = n5_0
            o5[2 * i + 1] = n5_1
            w16[4 * i + 0] = n14_0
            w16[4 * i + 1] = n15_0
            w16[4 * i + 2] = n14_1
            w16[4 * i + 3] = n15_1
            # Past the edges d and z are zero, and so is every term.
            p20_0[2 * i] = p20_0[2 * i] + n8_0 * n5_0 + n8_1 * n5_1 + n14_0 * gate_0 + n14_1 * gate_1
        pack(w16, cutlass.BFloat16, accumulator)
        return (o5, )


class Finish1_20:
    @cute.jit
    def __call__(self, p20_0, o20, stream):
        blocks = cute.ceil_div(o20.shape[0] * WIDTH, BLOCK)
        launched = self.kernel(p20_0, o20)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p20_0, o20):
        thread = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
        lane = thread % WIDTH
        # Past the end, the last value again: shuffles want whole warps.
        at = cutlass.min(thread // WIDTH, o20.shape[0] - 1)
        tiles = p20_0.shape[2]
        last = tiles - 1
        cute.arch.griddepcontrol_wait()
        total = Float32(0.0)
        for start in cutlass.range(0, tiles, WIDTH * BATCH, unroll=1):
            k0 = start + lane
            k1 = k0 + WIDTH
            k2 = k0 + 2 * WIDTH
            k3 = k0 + 3 * WIDTH
            k4 = k0 + 4 * WIDTH
            k5 = k0 + 5 * WIDTH
            # Clamped and unconditional, so that all are in flight together.
            v0 = p20_0[0, at, cutlass.min(k0, last)]
            v1 = p20_0[0, at, cutlass.min(k1, last)]
            v2 = p20_0[0, at, cutlass.min(k2, last)]
            v3 = p20_0[0, at, cutlass.min(k3, last)]
            v4 = p20_0[0, at, cutlass.min(k4, last)]
            v5 = p20_0[0, at, cutlass.min(k5, last)]
            s0 = Float32(choose(k0 < tiles, v0, 0.0)) + Float32(choose(k1 < tiles, v1, 0.0))
            s1 = Float32(choose(k2 < tiles, v2, 0.0)) + Float32(choose(k3 < tiles, v3, 0.0))
            s2 = Float32(choose(k4 < tiles, v4, 0.0)) + Float32(choose(k5 < tiles, v5, 0.0))
            total = total + ((s0 + s1) + s2)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=8)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=4)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        if thread == at * WIDTH:
            o20[at] = total.to(o20.element_type)
