"""Cutting a program into steps: one GEMM each, with the tile expressions that ride on its
accumulator, and the vector arithmetic that becomes possible once its reductions are final.

A tile expression's *home* is the last GEMM it needs. It is computed there, in registers; a tile of
an earlier home is stored once and read back. An expression that needs a vector which is final only
after its home is *pending*: it waits for a later GEMM to ride on, and is refused if none comes.
Standard library only: the jail imports this module.
"""

from __future__ import annotations

from typing import NamedTuple

from primitives.ir import Node, Program, ProgramError, Type

WIDTHS = {(1, 2): 0.5, (1, 1): 1.0, (2, 1): 2.0}  # of a tile, relative to its step's N
REDUCTIONS = ("row_sums",)


class GemmStep:
    """One fused GEMM: nodes of the program by what the kernel does with them."""

    def __init__(self, index: int, gemm: int):
        self.index, self.gemm = index, gemm
        self.stores: list[int] = []
        self.reductions: list[int] = []
        self.loads: list[int] = []
        self.vectors: list[int] = []  # the row and column nodes it spreads
        self.scalars: list[int] = []
        self.body: list[int] = []  # every tile node, in order


class Steps(NamedTuple):
    """``gemms`` in order; ``finishes[k]``: vectors to store once step k is done (-1: before all)."""

    gemms: tuple[GemmStep, ...]
    finishes: dict[int, tuple[int, ...]]
    width: dict[tuple[int, int], float]  # of a tile by (step, node): 0.5, 1 or 2 of that step's N
    types: tuple[Type, ...]


class _Cutter:
    def __init__(self, program: Program, lines: list[int | None] | None):
        self.program, self.nodes, self.types = program, program.nodes, program.types()
        self.lines = lines or [None] * len(self.nodes)
        gemms = self.gemms_in_order()
        self.steps = [GemmStep(k, g) for k, g in enumerate(gemms)]
        self.step_of = {g: k for k, g in enumerate(gemms)}
        self.home: list[int] = []  # of tiles: the step of the accumulator they need, -1 for none
        self.after: list[int] = []  # the step whose reductions must be final first, -1 for none
        self.finishes: dict[int, list[int]] = {}
        self.width: dict[tuple[int, int], float] = {}

    def fail(self, code: str, message: str, index: int) -> ProgramError:
        return ProgramError(code, message, self.lines[index])

    def gemms_in_order(self) -> list[int]:
        """GEMMs after those that their operands need, and where possible after those whose reductions
        their epilogue spreads, whatever the order of independent ones in the program."""
        needs, wishes = self.dependencies()
        order: dict[int, None] = {}
        while len(order) < len(needs):
            free = [g for g in needs if g not in order and needs[g] <= order.keys()]
            order[next((g for g in free if wishes[g] <= order.keys()), free[0])] = None
        return list(order)

    def dependencies(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """By GEMM: the GEMMs that its operands need, and those whose sums meet its accumulator alone."""
        needs: dict[int, set[int]] = {}
        wishes: dict[int, set[int]] = {}
        tiles: list[set[int]] = []  # by node: the accumulators it reads,
        sums: list[set[int]] = []  # and the GEMMs whose reductions it reads
        for index, node in enumerate(self.nodes):
            read = set().union(*(tiles[a] for a in node.args))
            summed = set().union(*(sums[a] for a in node.args))
            if node.op == "gemm":
                needs[index] = (read | summed).union(*(needs[g] for g in read | summed))
                wishes[index] = set()
                read, summed = {index}, set()
            elif node.op in REDUCTIONS:
                read, summed = set(), read | summed
            elif len(read) == 1:
                (home,) = read
                wishes[home] |= {g for g in summed if g != home and home not in needs[g]}
            tiles.append(read)
            sums.append(summed)
        return needs, wishes

    def place(self) -> None:
        """Homes, in node order. A tile of inputs alone that must leave its step rides along with the
        first GEMM that loads all of those inputs anyway."""
        reads = self.inputs_read()
        loaded = self.loaded(reads)
        roots = self.roots()
        for index, node in enumerate(self.nodes):
            home = max((self.home[a] for a in node.args), default=-1)
            after = max((self.after[a] for a in node.args), default=-1)
            if node.op == "gemm":
                home, after = self.step_of[index], -1
            elif node.op in REDUCTIONS:
                home, after = -1, home
            elif self.types[index].kind != "tile":
                home = -1
            elif home < 0 and index in roots:
                home = next((k for k in range(after + 1, roots[index]) if reads[index] <= loaded[k]), -1)
            self.home.append(home)
            self.after.append(after)

    def roots(self) -> dict[int, int]:
        """Tiles that must be computed somewhere, with the number of steps that come early enough."""
        found = {a: len(self.steps) for n in self.nodes if n.op in REDUCTIONS for a in n.args}
        found |= {i: len(self.steps) for i in self.program.outputs.values()}
        for step in self.steps:
            for operand in self.nodes[step.gemm].args:
                source = self.untransposed(operand)
                found[source] = min(step.index, found.get(source, step.index))
        return {i: k for i, k in found.items() if self.nodes[i].op != "input"}

    def loaded(self, reads: list[set[int]]) -> list[set[int]]:
        """The input tiles that each step's accumulator meets."""
        found: list[set[int]] = [set() for _ in self.steps]
        last = [-1] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            if node.op == "gemm":
                last[index] = self.step_of[index]
            elif self.types[index].kind == "tile" and node.args:
                last[index] = max(last[a] for a in node.args)
                if last[index] >= 0:
                    for argument in node.args:
                        if last[argument] < 0:
                            found[last[index]] |= reads[argument]
        return found

    def inputs_read(self) -> list[set[int]]:
        """By node: the input tiles that it reads through tiles; a gemm's operands do not count."""
        found: list[set[int]] = []
        for index, node in enumerate(self.nodes):
            if self.types[index].kind != "tile" or node.op == "gemm":
                found.append(set())
            else:
                found.append({index} if node.op == "input" else set().union(*(found[a] for a in node.args)))
        return found

    def untransposed(self, operand: int) -> int:
        node = self.nodes[operand]
        return node.args[0] if node.op == "transpose" else operand

    def ready(self, index: int, use: str) -> int:
        """The step that computes a tile which must leave it; ProgramError if none can."""
        home, after = self.home[index], self.after[index]
        if home < 0:
            raise self.fail(
                "homeless",
                f"{use} has no GEMM to ride on: a tile is computed in the epilogue of a gemm "
                "whose result it uses, or whose epilogue loads all that it reads anyway",
                index,
            )
        if after >= home:
            raise self.fail(
                "pending",
                f"{use} needs a reduction over whole rows of a step that is not done until "
                "all of its tiles are: a row scale commutes with the next matmul, so write "
                "gemm(t, w) * per_row(scale) instead of gemm(t * per_row(scale), w)",
                index,
            )
        return home

    def cut(self) -> Steps:
        self.check_outputs()
        self.place()
        for name, index in self.program.outputs.items():
            if self.types[index].kind == "tile":
                self.store(index, f"output {name!r}")
            else:
                self.finish(index)
        for step in self.steps:
            for operand in self.nodes[step.gemm].args:
                self.operand(operand)
        for index, node in enumerate(self.nodes):
            if node.op in REDUCTIONS:
                home = self.ready(node.args[0], f"the argument of {node.op}")
                self.steps[home].reductions.append(index)
        # Later steps first: what they read back, earlier ones must store.
        for step in reversed(self.steps):
            self.collect(step)
        if not self.steps:
            raise ProgramError("homeless", "the kernel calls gemm nowhere: there is no epilogue to fuse into")
        finishes = {k: tuple(sorted(v)) for k, v in self.finishes.items()}
        return Steps(tuple(self.steps), finishes, self.width, self.types)

    def check_outputs(self) -> None:
        """Each output is written once, by a kernel: it is a value of its own."""
        seen: dict[int, str] = {}
        for name, index in sorted(self.program.outputs.items()):
            node = self.nodes[index]
            if node.op == "input":
                raise self.fail(
                    "outputs",
                    f"output {name!r} is the input {node.attribute!r} itself: leave copying to the caller",
                    index,
                )
            if index in seen:
                raise self.fail(
                    "outputs",
                    f"outputs {seen[index]!r} and {name!r} are one value: return it once and let "
                    "the spec declare one output",
                    index,
                )
            seen[index] = name

    def operand(self, index: int) -> None:
        source = self.untransposed(index)
        if self.nodes[source].op != "input":
            self.store(source, "this operand of gemm")

    def store(self, index: int, use: str) -> None:
        step = self.steps[self.ready(index, use)]
        if index not in step.stores:
            step.stores.append(index)

    def finish(self, index: int) -> None:
        """A vector that something outside the vector kernels reads must be stored."""
        if self.nodes[index].op == "input":
            return
        stage = self.finishes.setdefault(self.after[index], [])
        if index not in stage:
            stage.append(index)

    def collect(self, step: GemmStep) -> None:
        """Everything the epilogue computes or loads, walking back from what it stores and reduces."""
        wanted = {*step.stores, *(self.nodes[r].args[0] for r in step.reductions)}
        step.stores.sort()
        for index in range(max(wanted, default=-1), -1, -1):
            if index in wanted:
                wanted.update(self.visit(index, step))
        for nodes in (step.loads, step.vectors, step.scalars, step.body):
            nodes.reverse()

    def visit(self, index: int, step: GemmStep) -> tuple[int, ...]:
        """Say how a step comes by a value: loaded, or computed from those returned."""
        node, kind = self.nodes[index], self.types[index].kind
        if node.op == "constant":
            return ()
        if node.op == "dim":
            step.scalars.append(index)
            return ()
        if node.op in ("per_row", "per_column"):
            self.finish(node.args[0])
            if node.op == "per_column":
                self.check_width(index, step, axis=0)
            step.vectors.append(index)
            return ()
        if kind == "tile":
            self.check_width(index, step)
            stored = self.home[index] >= 0 and self.after[index] < self.home[index] < step.index
            if stored:
                self.store(index, "this tile")
            if stored or node.op == "input":
                step.loads.append(index)
                return ()
        step.body.append(index)
        return () if node.op == "gemm" else node.args

    def check_width(self, index: int, step: GemmStep, axis: int = 1) -> None:
        rows, columns = self.types[step.gemm].shape
        own = self.types[index].shape
        width = WIDTHS.get(own[axis].ratio(columns) or (0, 0))
        if axis == 1 and own[0] != rows or width is None:
            raise self.fail(
                "width",
                f"a {self.types[index]} in the epilogue of a gemm [{rows}, {columns}]: tiles "
                "there have its rows, and half, once or twice its columns",
                index,
            )
        if axis == 0 and width != 1:
            raise self.fail(
                "width",
                f"per_column of {own[0]} values in the epilogue of a gemm with {columns} columns: "
                "a vector spread over columns has the gemm's own length",
                index,
            )
        self.width[step.index, index] = width


def cut(program: Program, lines: list[int | None] | None = None) -> Steps:
    """The steps of a checked program; ProgramError (with the line, if known) where none exist."""
    return _Cutter(program, lines).cut()


def materialised(steps: Steps, nodes: tuple[Node, ...]) -> set[int]:
    """Tile nodes that are read again after rounding: operands of later GEMMs and tiles read back."""
    read = {i for s in steps.gemms for i in s.loads if nodes[i].op != "input"}
    for step in steps.gemms:
        for operand in nodes[step.gemm].args:
            source = nodes[operand].args[0] if nodes[operand].op == "transpose" else operand
            if nodes[source].op != "input":
                read.add(source)
    return read
