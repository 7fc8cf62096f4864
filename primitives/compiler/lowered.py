"""The result of lowering (code, and the arguments of its kernels), and the base class of the code
generators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from coda_agent.primitives.lang.cutedsl import Reduction, Spread, Statistic
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import OPERATIONS, Program, reduction
from coda_agent.primitives.lang.schedule import LARGE_TILES, Schedule
from coda_agent.primitives.lang.signature import EIGHTS
from coda_agent.primitives.lang.steps import Steps

CUTE_DTYPES = {
    "bf16": "cutlass.BFloat16",
    "fp16": "cutlass.Float16",
    "fp32": "Float32",
    "int32": "cutlass.Int32",
    "int64": "cutlass.Int64",
}
HEAD_GRAIN = 8  # columns after which the pattern of one thread's accumulator lanes repeats
SUBTILE = 32  # columns of one epilogue subtile, unless ``subtile`` returns another number
# tile_n must be a multiple of this if TMA stores a tile that is half as wide as the GEMM
PAIR_GRAIN = Dim.parse(32)

Role = Literal[
    "load",
    "store",
    "range",
    "row",
    "column",
    "index",
    "memory",
    "table",
    "head",
    "partial",
    "scalar",
    "pointer",
    "extent",
    "vector",
    "out",
    "count",
    "bounds",
]


@dataclass(frozen=True)
class Argument:
    """One tensor or number that a kernel takes. ``node``: the node of the program to which the argument
    belongs. ``name``: a generated name.

    The role says what the kernel does with the argument. ``load`` and ``store``: a tile that TMA moves.
    ``range``: a column range of a tile, except for the tile's first range, which has the role ``store``; all
    ranges of a tile are stored together. ``memory``: a tile that threads load and store without TMA.
    ``table``: a tile that is read again for each head.
    ``row``, ``column``: a vector. ``index``: a vector of integers. ``head``: the width of heads. ``scalar``:
    a number. ``pointer``: a number in memory. ``extent``: a tile's number of columns. ``count``: a tile's
    number of rows. ``bounds``: clamped offsets, which rise from 0 to the number of rows.

    ``packed``: the tile has 16-bit values and twice the GEMM's columns, and is passed as 32-bit lanes.
    ``part``: the number (0 or 1) of a partial result; a tile with twice the GEMM's columns has two of them.
    ``period``: the width of heads.
    """

    name: str
    role: Role
    node: int
    dtype: str
    packed: bool = False
    part: int = 0
    rank: int = 1
    period: Dim | None = None

    @property
    def picks(self) -> bool:
        """Whether the argument holds selected values [M] in one buffer, instead of partial results per
        tile."""
        return self.role == "partial" and self.rank == 1


@dataclass(frozen=True)
class GemmKernel:
    """A step's class and its arguments. ``c`` and ``d`` are the mainloop's own epilogue load and store;
    further loads and stores are among ``arguments``. ``shape``: the GEMM's rows and columns. ``periods``: the
    widths of heads in the GEMM's columns. ``grains``: numbers that must divide a tile's number of columns,
    including the widths of heads with statistics. ``adds``: the input to which D is added in place.
    ``starts``: the name and the first column of each range. ``bounds``: for each ``in_columns``, its first
    column and the column after its last column. ``offsets``: if rows belong to experts, the input that holds
    each expert's first row. ``own``: whether there is one GEMM per expert, over that expert's rows.
    ``index``: the input that holds the numbers of the rows that the GEMM gathers from ``a``."""

    step: int
    name: str
    a: int
    b: int
    a_transposed: bool
    b_transposed: bool
    dtype: str
    c: Argument | None
    d: Argument | None
    arguments: tuple[Argument, ...]
    shape: tuple[Dim, Dim]
    periods: tuple[Dim, ...]
    grains: tuple[Dim, ...]
    adds: int | None = None
    starts: tuple[tuple[str, Dim], ...] = ()
    bounds: tuple[tuple[Dim, Dim], ...] = ()
    offsets: int | None = None
    own: bool = False
    index: int | None = None

    def admits(self, schedule: Schedule, sizes: Mapping[str, int]) -> bool:
        """Whether there is no ``objection`` to a schedule."""
        return not self.objection(schedule, sizes)

    def objection(self, schedule: Schedule, sizes: Mapping[str, int]) -> str:
        """Say why a schedule does not suit the step; return "" if the schedule suits it. The schedule's tile
        must contain whole pairs, and the heads that ``cuts`` describes. Each range must begin where a subtile
        begins. Only a ``splittable`` step can run as two launches. ``sizes`` contains the static dims."""
        if schedule.split and not self.splittable:
            return "two launches cannot share rows that belong to experts"
        if self.index is not None and schedule.cluster_n > 1:
            return "a GEMM that gathers rows needs clusters of one tile along N"
        columns = max(SUBTILE, subtile(schedule, self.d)[1])
        if self.cuts(schedule.tile_n, sizes) or self.narrow(sizes, columns) or self.torn(sizes, columns):
            tile = f"{schedule.tile_n} columns" + (f" in subtiles of {columns}" if columns > SUBTILE else "")
            return f"a tile of {tile} does not hold {self.wants(sizes, columns)}"
        return ""

    def cuts(self, columns: int, sizes: Mapping[str, int]) -> bool:
        """Whether a tile of so many columns ends inside a pair, or inside a head that must be whole. A head
        with statistics must be whole. A head that reads a table may be several tiles wide, if TMA loads the
        table."""
        tables = [width(sizes) for width in self.tables]
        return any(columns % grain(sizes) for grain in self.grains) or any(
            columns % width and (width % SUBTILE or width % columns) for width in tables
        )

    @property
    def tables(self) -> tuple[Dim, ...]:
        """The widths of heads that read a table."""
        return tuple(a.period for a in self.arguments if a.role == "table" and a.period)

    @property
    def splittable(self) -> bool:
        """Whether two launches can share the rows. This is impossible if rows belong to experts."""
        return self.offsets is None

    def torn(self, sizes: Mapping[str, int], columns: int = SUBTILE) -> dict[int, int]:
        """Map the node of each range that begins inside an epilogue subtile to the range's first column. Such
        a range cannot be stored, because a bulk store can skip columns after its tensor's last column, but
        not before its first column. ``columns``: the subtile's width."""
        firsts = {int(name[1:]): first for name, first in self.range_starts(sizes)}
        return {node: first for node, first in firsts.items() if first % columns}

    def narrow(self, sizes: Mapping[str, int], columns: int = SUBTILE) -> bool:
        """Whether an epilogue would mix columns of several heads. ``columns``: the width of an epilogue
        subtile.

        Every head width must be a multiple of HEAD_GRAIN, because a thread holds two of every HEAD_GRAIN
        columns. In two cases, the head width must also be a multiple of ``columns``. First, if heads have
        statistics, which combine a subtile's columns. Second, if TMA loads a table, one subtile's width at a
        time; TMA does so if the head width is a multiple of SUBTILE."""
        heads = [(a.role, a.period(sizes)) for a in self.arguments if a.period]
        whole = [width for role, width in heads if role == "head" or width % SUBTILE == 0]
        mixed = any(width % columns for width in whole)
        return mixed or any(period(sizes) % HEAD_GRAIN for period in self.periods)

    def wants(self, sizes: Mapping[str, int], columns: int = SUBTILE) -> str:
        """Describe what a tile must contain, for the person who chose the sizes or the tile. ``columns``: the
        width of the tile's subtiles."""
        found = [self._wanted_heads(period, sizes) for period in self.periods]
        if found:
            usual = f"{HEAD_GRAIN}; of {SUBTILE} for head_sums and parts"
            found[-1] += f" (head widths are multiples of {usual if columns == SUBTILE else columns})"
        if PAIR_GRAIN in self.grains:
            found.append(f"multiples of {PAIR_GRAIN} columns for its pairs")
        if torn := self.torn(sizes, columns):
            begin = ", ".join(map(str, sorted(torn.values())))
            found.append(f"ranges from columns {begin} on (multiples of {columns})")
        return " and ".join(found)

    def _wanted_heads(self, period: Dim, sizes: Mapping[str, int]) -> str:
        width = period(sizes)
        if period not in {*self.grains, *self.tables}:
            return f"heads of {width} columns"
        parts = period not in self.grains and width % SUBTILE == 0
        return f"whole heads of {width} columns" + (", or an equal part of one" if parts else "")

    def fitting(self) -> tuple[int, ...]:
        """The head widths, in GEMM columns, that suit some large tile, up to twice the widest tile. ()
        if every tile suits all heads."""
        if not self.tables and not {*self.periods} & {*self.grains}:
            return ()
        sums = any(a.role == "head" and a.period for a in self.arguments)
        pairs = PAIR_GRAIN({}) if PAIR_GRAIN in self.grains else 1
        tiles = {n for _, n, _ in LARGE_TILES if n % pairs == 0}
        step = SUBTILE if sums else HEAD_GRAIN
        return tuple(
            width
            for width in range(step, 2 * max(tiles) + 1, step)
            if any(n % width == 0 or not sums and width % SUBTILE == width % n == 0 for n in tiles)
        )

    def range_starts(self, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Evaluate ``starts`` at these sizes of the static dims."""
        return tuple((name, first(sizes)) for name, first in self.starts)

    def column_bounds(self, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """Evaluate ``bounds`` at these sizes of the static dims."""
        return tuple((first(sizes), past(sizes)) for first, past in self.bounds)

    def head_widths(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Evaluate ``periods`` at these sizes of the static dims."""
        return tuple(period(sizes) for period in self.periods)


@dataclass(frozen=True)
class VectorKernel:
    """A kernel that runs after ``step`` (-1: before all steps), and computes the vectors that are final
    then."""

    step: int
    name: str
    length: int  # a node with the vectors' length
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Lowered:
    """A lowered program: its code (``text``), and the kernels that a caller launches. The program alone
    determines how the kernels are called; an edit of the code cannot change this. ``unedited``: the original
    lowering, if an author edited ``text``. Edited code is untrusted."""

    text: str
    hash: str
    gemms: tuple[GemmKernel, ...]
    vectors: tuple[VectorKernel, ...]
    unedited: Lowered | None = None

    @property
    def edited(self) -> bool:
        return self.unedited is not None

    @property
    def module(self) -> str:
        """The module name under which the code is imported. All edits of one lowering share one name."""
        return f"coda_edited_{self.unedited.hash[:16]}" if self.unedited else f"coda_lowered_{self.hash[:16]}"


def subtile(schedule: Schedule, d: Argument | None) -> tuple[int, int]:
    """The rows and columns of one epilogue subtile, as QuACK's ``GemmSm90`` computes its ``epi_tile``. The
    subtile has 64 rows for each warpgroup that works on the tile. With ``pingpong`` and an fp8 ``d``, the
    subtile has twice as many columns.
    """
    wide = schedule.pingpong and d is not None and d.dtype in EIGHTS
    return 64 if schedule.pingpong else 128, math.gcd(2 * SUBTILE if wide else SUBTILE, schedule.tile_n)


def literal(value: float) -> str:
    """Write a number as Python text that reads back exactly; ``float.hex`` verifies this."""
    if math.isinf(value):
        return "LOWEST" if value < 0 else "(-LOWEST)"
    if float(repr(value)).hex() != value.hex():
        raise ValueError(f"{value!r} does not survive printing")
    return f"({value!r})" if value < 0 else repr(value)


class Writer:
    """The base class of the code generators. It looks up nodes' properties, and writes operations as code."""

    def __init__(self, program: Program, steps: Steps):
        self.program, self.nodes, self.steps = program, program.nodes, steps

    def expression(self, index: int, values: list[str], exact: bool) -> str:
        operation = OPERATIONS[self.nodes[index].op]
        template = operation.cute if exact or operation.fast is None else operation.fast
        if template is None:
            raise ValueError(f"operation {operation.name} has no CuTeDSL text of its own")
        return template.format(*values)

    def constant(self, index: int) -> float:
        return float(str(self.nodes[index].attribute))

    def dtype(self, index: int) -> str:
        """The dtype of a node in memory. It is fp32, except for inputs, outputs and tiles between steps."""
        given = self.program.input_tensor(index)
        return given.dtype if given else self.steps.dtypes.get(index, "fp32")

    def reduction(self, index: int) -> Reduction:
        """The reduction of a node, which must have one."""
        how = reduction(self.nodes[index])
        assert how is not None  # callers pass only nodes that the steps list as reductions
        return how

    def statistic(self, index: int) -> Statistic:
        """The statistic of a node, which must have one."""
        how = OPERATIONS[self.nodes[index].op].statistic
        assert how is not None  # callers pass only nodes that the steps list as statistics
        return how

    def spread(self, index: int) -> Spread:
        """The spread of a node, which must have one."""
        how = OPERATIONS[self.nodes[index].op].spread
        assert how is not None  # callers pass only nodes that the steps list as spread vectors
        return how

    def reduced_width(self, index: int) -> float:
        """The width of the tile that a node reduces, relative to its GEMM."""
        step = next(s.index for s in self.steps.gemms if index in s.reductions)
        return self.steps.width[step, self.nodes[index].args[0]]

    def partials(self, index: int) -> list[Argument]:
        """The arguments for a reduction's partial results: two arguments for a column reduction of a tile
        with twice the GEMM's columns, otherwise one."""
        how = self.reduction(index)
        parts = 2 if how.axis == "column" and self.reduced_width(index) == 2 else 1
        rank = 1 if how.selects else 3
        return [Argument(f"p{index}_{k}", "partial", index, "fp32", part=k, rank=rank) for k in range(parts)]
