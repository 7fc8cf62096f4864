"""Choose the resources of a step's epilogue. A resource is an object of the kernel that loads, stores or
reduces one value, such as a tile that TMA moves, a vector or a reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from coda_agent.primitives.compiler.lowered import PAIR_GRAIN, Argument, Writer
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Program, sizes_named
from coda_agent.primitives.lang.signature import EIGHTS
from coda_agent.primitives.lang.steps import GemmStep, Steps

HALF = {0.5: 2, 1.0: 1}  # GEMM columns per column of a tile; keys are the tile's width relative to the GEMM


class StepResources(Writer):
    """The arguments of a step's kernel, grouped by use, and the code that constructs their resources. The
    classes of the resources are QuACK's and ours."""

    def __init__(self, program: Program, steps: Steps, step: GemmStep):
        super().__init__(program, steps)
        self.step = step
        self.grouped = self.nodes[step.gemm].offsets is not None
        self.own = self.steps.types[step.gemm].kind == "experts"
        self.sums = self.accumulated()
        self.loads = [self.load(i) for i in step.loads if not self.sums or i != self.sums[1]]
        self.ranges = self.shared_ranges()
        self.stores = [self.store(i) for i in step.stores]
        # The widest load and the widest store become the mainloop's own C and D, which determine the size of
        # the epilogue's subtile.
        self.c = max((a for a in self.loads if a.role == "load"), key=self.width_of, default=None)
        wide = [
            s
            for s in self.stores
            if s.role == "store" and s.node not in self.ranges and self.width_of(s) >= 1
        ]
        self.d = max(wide, key=self.width_of, default=None)
        if self.sums:
            self.d = next(s for s in wide if self.sums and s.node == self.sums[0])
        self.periods = sorted({self.period(i) for i in (*step.repeats, *step.statistics)}, key=str)

    def width(self, index: int) -> float:
        return self.steps.width[self.step.index, index]

    def width_of(self, argument: Argument) -> float:
        return self.width(argument.node)

    def accumulated(self) -> tuple[int, int, int] | None:
        """Find an fp32 output that is the sum of an input and a tile, and that overwrites the input. Return
        the nodes of the output, the input and the tile, or None if there is no such output. The store of such
        an output adds the tile to the input in memory, so the step does not load the input. QuACK cannot
        store in this way for a GEMM with offsets."""
        updates = {} if self.grouped else self.program.signature.updates
        for output, name in updates.items():
            index = self.program.outputs[output]
            node = self.nodes[index]
            if index not in self.step.stores or node.op != "add" or self.dtype(index) != "fp32":
                continue
            readers = [n.args for n in self.nodes if index in n.args]
            for old, new in (node.args, node.args[::-1]):
                used = [n for n in self.nodes if old in n.args]
                is_it = self.nodes[old].op == "input" and self.nodes[old].attribute == name
                alone = used == [node] and old != new and not readers
                if is_it and alone and self.steps.types[new].kind == "tile" and self.width(index) == 1:
                    return index, old, new
        return None

    def shared_ranges(self) -> dict[int, list[int]]:
        """Group stored column ranges (``column_range``) by their tile and dtype, because the ranges of a
        group share a pipeline stage. The result maps each group's first range to all ranges of the group."""
        found: dict[tuple[int, str], list[int]] = {}
        for index in self.step.stores:
            if self.steps.types[index].kind == "range":
                found.setdefault((self.nodes[index].args[0], self.dtype(index)), []).append(index)
        return {members[0]: members for members in found.values()}

    @property
    def memory(self) -> str:
        """The class of the resource for a matrix that threads load and store themselves, without TMA."""
        return "Rows" if self.grouped else "Memory"

    def starts(self) -> tuple[tuple[str, Dim], ...]:
        """The name and the first column of each stored column range."""
        members = [i for shared in self.ranges.values() for i in shared]
        return tuple((f"o{i}", Dim.parse(sizes_named(self.nodes[i])[0])) for i in members)

    def bounds(self) -> tuple[tuple[int, Dim, Dim], ...]:
        """For each ``in_columns``: its node, its first column, and the column after its last column."""
        inside = [i for i in (*self.step.body, *self.step.sweep) if self.nodes[i].op == "in_columns"]
        found = {i: list(map(Dim.parse, sizes_named(self.nodes[i]))) for i in sorted(inside)}
        return tuple((i, first, first + width) for i, (first, width) in found.items())

    def load(self, index: int) -> Argument:
        width, dtype = self.width(index), self.dtype(index)
        role: Literal["load", "memory"] = "load" if self.streams(width, dtype) and width >= 1 else "memory"
        return Argument(f"t{index}", role, index, dtype, role == "load" and width == 2, rank=2)

    def store(self, index: int) -> Argument:
        dtype = self.dtype(index)
        head = self.steps.types[index].kind == "head"
        width = 0.0 if head else self.width(index)
        streams = self.streams(width, dtype) or (dtype in EIGHTS and width < 1)
        role: Literal["store", "range", "memory"] = "store" if not head and streams else "memory"
        if self.steps.types[index].kind == "range" and index not in self.ranges:
            role = "range"
        return Argument(f"o{index}", role, index, dtype, role == "store" and width == 2, rank=2)

    @staticmethod
    def streams(width: float, dtype: str) -> bool:
        """Whether TMA can move a tile of this dtype and of this width, relative to the GEMM. A tile that is
        not as wide as the GEMM must have 16-bit values, two to a lane."""
        return width == 1 or dtype in ("bf16", "fp16")

    def period(self, index: int) -> Dim:
        """The width of a node's heads, in GEMM columns."""
        kind, _, period = self.steps.types[index]
        assert period is not None  # repeated values and statistics have heads
        if kind == "head":
            return period
        return period * Dim.parse(HALF[self.width(index)])

    def heads(self, index: int) -> str:
        """The code for the width of a node's heads. The width is a compile-time number."""
        return f"self.head_widths[{self.periods.index(self.period(index))}]"

    def grains(self) -> tuple[Dim, ...]:
        """Numbers that must divide a schedule's ``tile_n``: the widths of heads that are reduced. If TMA
        stores a tile of half the GEMM's width, PAIR_GRAIN is another such number."""
        halves = any(s.role == "store" and self.width_of(s) < 1 for s in self.stores)
        whole = {self.period(i) for i in self.step.statistics}
        return (*(p for p in self.periods if p in whole), *((PAIR_GRAIN,) if halves else ()))

    def all(self) -> Iterator[tuple[Argument, str]]:
        """Yield the argument and the constructor's code of each resource, except C and D (the mainloop's own
        load and store)."""
        for load in self.loads:
            if load is not self.c:
                kind = "TileLoad" if load.role == "load" else self.memory
                yield load, f'{kind}("{load.name}")'
        for index in self.step.vectors:
            yield self.vector(index)
        for index in self.step.repeats:
            yield self.repeat(index)
        for index in self.step.scalars:
            role: Literal["pointer", "scalar"] = "pointer" if self.nodes[index].op == "input" else "scalar"
            yield Argument(f"s{index}", role, index, "fp32", rank=0), f'Scalar("s{index}")'
        for index in self.step.statistics:
            head = Argument(f"h{index}", "head", index, "fp32", period=self.period(index))
            yield head, self.statistic(index).resource.format(name=head.name)
        for store in self.stores:
            if store.role == "memory":
                yield store, f'{self.memory}("{store.name}")'
            elif store.role == "range":
                yield store, f'Range("{store.name}")'
            elif store.node in self.ranges:
                names = ", ".join(f'"o{i}"' for i in self.ranges[store.node])
                yield store, f"RangeStore({names})"
            elif store is not self.d:
                half = self.width_of(store) < 1
                kind = "EightStore" if half and store.dtype in EIGHTS else "TileStore"
                yield store, f'{kind}("{store.name}"{", gated=True" if half else ""})'
        for index in self.step.reductions:
            yield from self.reduced(index)

    def repeat(self, index: int) -> tuple[Argument, str]:
        name, source = f"r{index}", self.nodes[index].args[0]
        rank = len(self.steps.types[source].shape)
        made = Argument(name, "memory", source, self.dtype(source), rank=rank)
        if not self.tables(index):
            return made, f'Memory("{name}")'
        return replace(made, role="table", period=self.period(index)), f'HeadTable("{name}")'

    def tables(self, index: int) -> bool:
        """Whether the node ``index`` repeats a tile for each head, and the repeated tile is as wide as the
        GEMM."""
        return len(self.steps.types[self.nodes[index].args[0]].shape) == 2 and self.width(index) == 1

    def vector(self, index: int) -> tuple[Argument, str]:
        name, vector = f"v{index}", self.nodes[index].args[0]
        spread = self.spread(index)
        if spread.role == "row" or self.width(index) == 1:
            return Argument(name, spread.role, vector, self.dtype(vector)), spread.resource.format(name=name)
        return Argument(name, "memory", vector, self.dtype(vector)), f'Memory("{name}")'

    def reduced(self, index: int) -> Iterator[tuple[Argument, str]]:
        how, given = self.reduction(index), f"i{index}"
        if how.selects:
            chosen = self.nodes[index].args[1]
            yield Argument(given, "index", chosen, self.dtype(chosen)), f'ColVecLoad("{given}")'
        for partial in self.partials(index):
            # For a GEMM with offsets, QuACK's tensors have no batch axis.
            rank = min(partial.rank, 2) if self.grouped else partial.rank
            yield replace(partial, rank=rank), how.resource.format(name=partial.name, index=given)
