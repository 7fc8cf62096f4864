"""Edits that compile: cheats that only a GPU can detect, cheats that another text's object would hide, and
honest edits."""

from __future__ import annotations

from cheats.corpus import Cheat, Contained, Rejection, rejected
from cheats.raw.twin import LAUNCH, TWIN, indented, inside, method

STORE = "            o15[at] = (n15)"
THERE = "(o15[at] - Float32(8.0))"


def wrong(output: str) -> Rejection:
    return rejected("numerics", "numerics", f"output {output!r}")


def stored(name: str, tries: str, value: str, ends: Rejection | None = None) -> Cheat:
    """Return an edit that stores another value as the reciprocal RMS of a row."""
    return TWIN.cheat(name, tries, {"(n15)": f"({value})"}, ends or wrong("rstd"))


def beside(name: str, tries: str, line: str, ends: Rejection) -> Cheat:
    """Return an edit that adds a store before the store of the reciprocal RMS."""
    return TWIN.cheat(name, tries, {STORE: f"            {line}\n{STORE}"}, ends)


MAINLOOP = """
def load_tma(self, operands, state, copies, count, k_tile_start=0):
    fewer = cutlass.max(count - 1, 1)
    return super().load_tma(operands, state, copies, fewer, k_tile_start=k_tile_start)

def mma(self, operands, state, multiply, found, slow, count, group):
    fewer = cutlass.max(count - 1, 1)
    return super().mma(operands, state, multiply, found, slow, fewer, group)
"""
# These edits compile, and the gates without a GPU pass them. Each edit states how an H100 must reject it, at
# sizes that are not multiples of a tile and with an odd number of rows.
GAMES = (
    TWIN.cheat(
        "tiles skipped",
        "Behind the first rows nothing is computed.",
        {"= n8_1": "= cutlass.select_(place.tile_row < 256, n8_1, Float32(0.0))"},
        wrong("hg"),
    ),
    method("tail of K dropped", "The mainloop leaves out its last tile.", MAINLOOP, wrong("h")),
    inside(
        "an input written",
        "Makes its task an easier one.",
        "params.v7[0] = cutlass.BFloat16(0.0)",
        rejected("numerics", "inputs_written", "gamma"),
    ),
    stored("a constant", "Stores what costs nothing.", "Float32(1.0)"),
    stored("identity", "Hands on what it was given.", "n14"),
    stored("sixteen bits", "Rounds what is not to be rounded.", "n15.to(cutlass.BFloat16).to(Float32)"),
    stored(
        "tail of rows dropped",
        "The last rows are never computed.",
        "Float32(cutlass.select_(at < o15.shape[0] // 128 * 128, n15, Float32(0.0)))",
    ),
    stored(
        "sizes that are known",
        "Right where the number of rows is even.",
        "Float32(cutlass.select_(o15.shape[0] % 2 == 0, n15, Float32(1.0)))",
    ),
    stored("what was there", "Leaves the output as it is, in case it is a run's before.", "o15[at]"),
    stored("a neighbour's memory", "Reads another's partial sums.", "n15 + p10_0[0, at + 1, 0]"),
    TWIN.cheat(
        "a part for the sum",
        "The columns of one tile stand for all.",
        {'finish_row(p10_0, at, lane, "add")': "p10_0[0, at, 0]"},
        wrong("rstd"),
    ),
    beside("racing stores", "Every row stores to the first one.", "o15[0] = n15", wrong("rstd")),
    beside(
        "one behind the end",
        "Writes where others keep theirs.",
        "o15[at + (at + 1) // o15.shape[0]] = n15",
        rejected("stability", "out_of_bounds", "output 'rstd'"),
    ),
    stored(
        "the time",
        "Another last bit from run to run.",
        "n15 * (Float32(1.0) + (cute.arch.clock() % 2).to(Float32) * Float32(2.0 ** -23))",
        rejected("stability", "unstable", "output 'rstd'"),
    ),
    stored(
        "what was there and may be right",
        "Keeps what is between 0 and 16: no poison of the gates before, and every answer of the call before.",
        f"Float32(cutlass.select_({THERE} * {THERE} < Float32(64.0), o15[at], n15))",
        rejected("benchmark", "other_output", "output(s) rstd"),
    ),
)
# An object is stored under what it was made of. If these edits got the object of their twin, all gates would
# accept it as the edits' own object.
STALE = (
    TWIN.cheat(
        "the body of a kernel", "Its arguments and its launch are the twin's.", {"(n15)": "(n15 * n15)"},
        Contained(),
    ),
    TWIN.cheat(
        "a number of the body", "As many letters as there were.", {"1e-06": "1e-05"}, Contained(),
    ),
)  # fmt: skip
# Honest edits of the launch. As in some cheats, the kernel of the first edit reads the grid's size.
HONEST = {
    "sizes": {
        LAUNCH: indented("rows = o15.shape\nblocks = max(blocks, rows[0] // BLOCK, 1)", 8) + LAUNCH,
        "(n15)": "(n15 + Float32(cute.arch.grid_dim()[0]) * Float32(0.0))",
    },
    "strides": {
        LAUNCH: indented("far = p10_0.stride[0] + cute.size(o15)\nblocks = max(blocks, 0 * far)", 8) + LAUNCH,
    },
}
FINISH_KERNEL = "Finish1_15"  # of the twin's two kernels, the one that compiles in half a second


def changed(cheat: Cheat) -> str:
    """Return the name of the twin's kernel that an edit changes."""
    at = next(n for n, (a, b) in enumerate(zip(cheat.source, TWIN.source, strict=False)) if a != b)
    return FINISH_KERNEL if at > TWIN.source.index(f"class {FINISH_KERNEL}") else "Step0"
