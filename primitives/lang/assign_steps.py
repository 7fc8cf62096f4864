"""Assign tiles to steps: order the GEMMs, and find for each node the step whose registers hold it.

The *home* of a tile expression is the last GEMM whose result the expression needs. The expression is
*pending* if it also reads a reduced vector that is complete only after the home GEMM has ended. Only the
epilogue of a later GEMM can compute a pending expression. This module needs only the standard library,
because the jail (the process that traces a kernel file) imports it.
"""

from __future__ import annotations

from typing import NamedTuple

from coda_agent.primitives.lang.ir import IN_STEP, OPERATIONS, Program, reduction
from coda_agent.primitives.lang.signature import Type


class Placement(NamedTuple):
    """The steps in which nodes are computed. ``gemms``: the GEMMs in step order. ``home``: for each node, the
    last step whose accumulator the node needs. ``after``: for each node, the last step whose reductions must
    be final before the node is computed. In ``home`` and ``after``, -1 means no step."""

    gemms: list[int]
    home: list[int]
    after: list[int]


def place(program: Program, types: tuple[Type, ...]) -> Placement:
    """The placement of a checked program's nodes."""
    return _Placer(program, types).place()


def untransposed(program: Program, operand: int) -> int:
    """The tile in memory that a gemm's operand reads: the operand itself or, if the operand is a transpose,
    the tile that is transposed."""
    node = program.nodes[operand]
    return node.args[0] if node.op == "transpose" else operand


def rows_by_expert(program: Program, gemm: int) -> int:
    """Return the tensor whose rows a GEMM's offsets divide among experts. This is the row index if the GEMM
    has one, otherwise the first operand."""
    node = program.nodes[gemm]
    return untransposed(program, node.args[0]) if node.row_index is None else node.row_index


class _Placer:
    def __init__(self, program: Program, types: tuple[Type, ...]):
        self.program, self.nodes, self.types = program, program.nodes, types
        self.gemms = self.gemms_in_order()
        self.step_of = {g: k for k, g in enumerate(self.gemms)}

    def gemms_in_order(self) -> list[int]:
        """Order the GEMMs. Each GEMM comes after the GEMMs that its operands need. Where possible, a GEMM
        also comes after the GEMMs whose reductions its epilogue reads."""
        needs, wishes = self.dependencies()
        order: dict[int, None] = {}
        while len(order) < len(needs):
            free = [g for g in needs if g not in order and needs[g] <= order.keys()]
            order[next((g for g in free if wishes[g] <= order.keys()), free[0])] = None
        return list(order)

    def dependencies(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Return two dicts. The first dict maps each GEMM to the GEMMs that its operands need. The second
        dict maps each GEMM to all other GEMMs whose reductions its epilogue reads."""
        needs: dict[int, set[int]] = {}
        wishes: dict[int, set[int]] = {}
        tiles: list[set[int]] = []  # for each node, the accumulators that it reads
        sums: list[set[int]] = []  # for each node, the GEMMs whose reductions it reads
        for index, node in enumerate(self.nodes):
            read = set().union(*(tiles[a] for a in node.args))
            summed = set().union(*(sums[a] for a in node.args))
            if node.op == "gemm":
                needs[index] = (read | summed).union(*(needs[g] for g in read | summed))
                wishes[index] = set()
                read, summed = {index}, set()
            elif reduction(node):
                read, summed = set(), read | summed
            elif len(read) == 1:
                (home,) = read
                wishes[home] |= {g for g in summed if g != home and home not in needs[g]}
            tiles.append(read)
            sums.append(summed)
        return needs, wishes

    def place(self) -> Placement:
        """Find the home of each node, in node order. Some tiles need no accumulator, but must be stored or
        reduced. The home of such a tile is the first step whose epilogue loads all of the tile's inputs
        anyway."""
        reads = self.inputs_read()
        loaded = self.loaded(reads)
        roots = self.roots()
        homes: list[int] = []
        afters: list[int] = []
        for index, node in enumerate(self.nodes):
            read = values_read(self.program, index)
            home = max((homes[a] for a in read), default=-1)
            after = max((afters[a] for a in read), default=-1)
            if node.op == "gemm":
                home, after = self.step_of[index], -1
            elif reduction(node):
                home, after = -1, home
            elif self.types[index].kind not in IN_STEP:
                home = -1
            elif home < 0 and index in roots:
                home = next((k for k in range(after + 1, roots[index]) if reads[index] <= loaded[k]), -1)
            homes.append(home)
            afters.append(after)
        return Placement(self.gemms, homes, afters)

    def roots(self) -> dict[int, int]:
        """Map each tile that must be stored or reduced to a number of steps. If the tile is an operand, it is
        the number of steps before the first GEMM that reads the tile. Otherwise, it is the number of all
        steps."""
        found = {n.args[0]: len(self.gemms) for n in self.nodes if reduction(n)}
        found |= {i: len(self.gemms) for i in self.program.outputs.values()}
        for step, gemm in enumerate(self.gemms):
            for operand in self.nodes[gemm].args:
                source = untransposed(self.program, operand)
                found[source] = min(step, found.get(source, step))
        return {i: k for i, k in found.items() if self.nodes[i].op != "input"}

    def loaded(self, reads: list[set[int]]) -> list[set[int]]:
        """The input tiles that each step's epilogue loads."""
        found: list[set[int]] = [set() for _ in self.gemms]
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
        """For each node, the input tiles that it reads, directly or through other tiles. Operands of a gemm
        are not included."""
        found: list[set[int]] = []
        for index, node in enumerate(self.nodes):
            if self.types[index].kind not in ("tile", "range") or node.op == "gemm":
                found.append(set())
            else:
                own = set().union(*(found[a] for a in values_read(self.program, index)))
                found.append({index} if node.op == "input" else own)
        return found


def values_read(program: Program, index: int) -> tuple[int, ...]:
    """The arguments whose values a node uses. The node uses only the shapes of its other arguments."""
    node = program.nodes[index]
    return node.args[: OPERATIONS[node.op].reads]
