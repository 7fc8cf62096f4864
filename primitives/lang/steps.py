"""The steps of a program, as ``partition.cut`` returns them.

This module needs only the standard library, because the jail (the process that traces a kernel file) imports
it.
"""

from __future__ import annotations

from typing import NamedTuple

from coda_agent.primitives.lang.assign_steps import Placement
from coda_agent.primitives.lang.ir import Program, reduction
from coda_agent.primitives.lang.signature import Type

NOT_ELEMENTWISE = ("gemm", "transpose", "per_row", "per_column", "per_head")


class GemmStep:
    """One fused GEMM: the program's nodes, grouped by their use in the kernel."""

    def __init__(self, index: int, gemm: int):
        self.index, self.gemm = index, gemm
        self.stores: list[int] = []  # tiles and head statistics
        self.reductions: list[int] = []
        self.statistics: list[int] = []  # head statistics, computed in a sweep before the epilogue
        self.loads: list[int] = []
        self.repeats: list[int] = []  # per_head of vectors and tiles in memory
        self.vectors: list[int] = []  # row and column nodes: vectors that the step spreads
        self.scalars: list[int] = []
        self.sweep: list[int] = []  # all tile nodes that statistics need, in order
        self.body: list[int] = []  # all tile nodes of the epilogue, in order


class Steps(NamedTuple):
    """The steps of a program. ``gemms``: the GEMM steps in order. ``finishes[k]``: the vectors to store after
    step k (-1: before all steps). ``width``: the width of a tile by (step, node), as a multiple (0.5, 1 or 2)
    of the step's N. ``dtypes``: the dtypes of values that leave their step."""

    gemms: tuple[GemmStep, ...]
    finishes: dict[int, tuple[int, ...]]
    width: dict[tuple[int, int], float]
    types: tuple[Type, ...]
    dtypes: dict[int, str]

    @property
    def vectors(self) -> set[int]:
        """All vectors that are stored."""
        return {i for roots in self.finishes.values() for i in roots}


def read_elsewhere(program: Program, placed: Placement, steps: Steps, output: str, name: str) -> int | None:
    """Find a node that must not read the input ``name``, because ``output`` overwrites the input. Such a node
    reads the input in a kernel that does not compute ``output``, or does not read it element by element.
    Return None if there is no such node."""
    for index, node in enumerate(program.nodes):
        if node.op in NOT_ELEMENTWISE and any(_is_input(program, a, name) for a in node.args):
            return index
    target = program.outputs[output]
    if steps.types[target].kind in ("tile", "range"):
        others = [step for step in steps.gemms if step.index != placed.home[target]]
        return next((s.gemm for s in others for i in s.loads if _is_input(program, i, name)), None)
    roots = sorted(steps.vectors - {*steps.finishes.get(placed.after[target], ())})
    return next((root for root in roots if _finish_reads(program, steps, root, name)), None)


def _finish_reads(program: Program, steps: Steps, root: int, name: str) -> bool:
    """Whether the kernel that computes a vector reads this input directly, and not through a stored
    vector."""
    seen, pending = set(steps.vectors), [root]
    while pending:
        index = pending.pop()
        if _is_input(program, index, name):
            return True
        if not reduction(program.nodes[index]):
            pending += set(program.nodes[index].args) - seen
            seen.update(program.nodes[index].args)
    return False


def _is_input(program: Program, index: int, name: str) -> bool:
    node = program.nodes[index]
    return node.op == "input" and node.attribute == name
