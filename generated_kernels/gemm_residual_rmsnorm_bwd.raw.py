"""Finish dgamma by one round of coalesced loads in a kernel launched early (PDL), and mask rstd once a row in place of every product, so that dgamma's sum is one FFMA an element."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import ColVecLoad, RowVecLoad, TileLoad, TileStore
from primitives.device.finish import BLOCK
from primitives.device.lanes import inside_rows
from primitives.device.mainloop import ColumnPartials, FusedGemm, arguments, fragment
from primitives.device.values import choose


def part_or_zero(partials, tile, at):
    # Past the last tile the last one is read and dropped: loads need no branch, and all are in flight at once.
    value = partials[0, cutlass.min(tile, partials.shape[1] - 1), at]
    return choose(tile < partials.shape[1], value, 0.0)


class Step0(FusedGemm):
    _epi_ops = (
        TileLoad("t9"),
        ColVecLoad("v5"),
        RowVecLoad("v11"),
        ColVecLoad("v14"),
        TileStore("o19"),
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
        o19 = fragment(accumulator)
        p8_0 = resources["p8_0"]
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            n2_0, n2_1 = accumulator[2 * i], accumulator[2 * i + 1]
            # Past M the product and h are zero; with rstd zero there, too, so is what dgamma gets.
            # Lanes of a pair share their row, and all pairs of a row share this select.
            rstd = choose(inside_rows(place, 2 * i), v5[2 * i], 0.0)
            n6_0 = (t3[2 * i + 0] * rstd)
            n6_1 = (t3[2 * i + 1] * rstd)
            p8_0[2 * i + 0] = p8_0[2 * i + 0] + n2_0 * n6_0
            p8_0[2 * i + 1] = p8_0[2 * i + 1] + n2_1 * n6_1
            n16_0 = (n2_0 * v11[2 * i] - n6_0 * v14[2 * i])
            n16_1 = (n2_1 * v11[2 * i + 1] - n6_1 * v14[2 * i])
            o19[2 * i + 0] = n6_0 * v11[2 * i]
            o19[2 * i + 1] = n6_1 * v11[2 * i + 1]
            accumulator[2 * i + 0] = t9[2 * i + 0] + rstd * n16_0
            accumulator[2 * i + 1] = t9[2 * i + 1] + rstd * n16_1
        return (o19, )


class Finish1_8:
    @cute.jit
    def __call__(self, p8_0, o8, stream):
        blocks = cute.ceil_div(o8.shape[0], 16)
        launched = self.kernel(p8_0, o8)
        launched.launch(grid=[blocks, 1, 1], block=[BLOCK, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, p8_0, o8):
        # A block finishes 16 columns: two whole sectors a row of partials, in 16 slices of rows.
        width = 16
        slices = BLOCK // width
        column, part = cute.arch.thread_idx()[0] % width, cute.arch.thread_idx()[0] // width
        index = cute.arch.block_idx()[0] * width + column
        at = cutlass.min(index, o8.shape[0] - 1)
        shared = cutlass.utils.SmemAllocator()
        parts = shared.allocate_tensor(Float32, cute.make_layout((width, slices)), byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        total = Float32(0.0)
        for first in cutlass.range(part, p8_0.shape[1], 8 * slices, unroll=1):
            x0 = part_or_zero(p8_0, first, at)
            x1 = part_or_zero(p8_0, first + slices, at)
            x2 = part_or_zero(p8_0, first + 2 * slices, at)
            x3 = part_or_zero(p8_0, first + 3 * slices, at)
            x4 = part_or_zero(p8_0, first + 4 * slices, at)
            x5 = part_or_zero(p8_0, first + 5 * slices, at)
            x6 = part_or_zero(p8_0, first + 6 * slices, at)
            x7 = part_or_zero(p8_0, first + 7 * slices, at)
            total = total + (((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)))
        parts[column, part] = total
        cute.arch.sync_threads()
        n8 = Float32(0.0)
        for k in cutlass.range_constexpr(slices):
            n8 = n8 + parts[column, k]
        if (part == 0) & (index == at):
            o8[at] = n8.to(o8.element_type)
