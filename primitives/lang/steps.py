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
    """One GEMM with its epilogue. Each list below holds the indices of the nodes that have one role in the
    step's kernel."""

    def __init__(self, index: int, gemm: int):
        self.index, self.gemm = index, gemm
        self.stores: list[int] = []  # tiles and head statistics that the step stores
        self.reductions: list[int] = []
        self.statistics: list[int] = []  # head statistics, computed in a pass before the epilogue
        self.loads: list[int] = []
        self.repeats: list[int] = []  # per_head nodes of vectors and tiles in memory
        self.vectors: list[int] = []  # per_row and per_column nodes, which spread a vector over a tile
        self.scalars: list[int] = []
        self.sweep: list[int] = []  # all tile nodes of the pass that computes statistics, in order
        self.body: list[int] = []  # all tile nodes of the epilogue, in order


class Steps(NamedTuple):
    """The steps of a program. ``gemms``: the GEMM steps in order. ``finishes[k]``: the vectors that are
    stored after step k, or before all steps if k is -1. ``width``: for a step and a node, the width of the
    node's tile, as a multiple (0.5, 1 or 2) of the step's N. ``types``: the type of each node. ``dtypes``:
    the dtype of each node whose value is stored."""

    gemms: tuple[GemmStep, ...]
    finishes: dict[int, tuple[int, ...]]
    width: dict[tuple[int, int], float]
    types: tuple[Type, ...]
    dtypes: dict[int, str]

    @property
    def vectors(self) -> set[int]:
        """The nodes of all vectors that are stored."""
        return {i for roots in self.finishes.values() for i in roots}


def read_elsewhere(program: Program, placed: Placement, steps: Steps, output: str, name: str) -> int | None:
    """Find a node whose read of the input ``name`` is unsafe, because ``output`` overwrites the input. A read
    is unsafe if it is not element by element, if its kernel is not the one that computes ``output``, or if it
    reads other columns than ``output`` overwrites. Return None if all reads are safe."""
    for index, node in enumerate(program.nodes):
        if node.op in NOT_ELEMENTWISE and any(_is_input(program, a, name) for a in node.args):
            return index
    target = program.outputs[output]
    kind = steps.types[target].kind
    if kind != "vector":
        # A range or a head statistic is stored at other columns than those that its own step reads.
        own = placed.home[target] if kind in ("tile", "experts") else None
        others = [step for step in steps.gemms if step.index != own]
        return next((s.gemm for s in others for i in s.loads if _is_input(program, i, name)), None)
    roots = sorted(steps.vectors - {*steps.finishes.get(placed.after[target], ())})
    return next((root for root in roots if _finish_reads(program, steps, root, name)), None)


def _finish_reads(program: Program, steps: Steps, root: int, name: str) -> bool:
    """Whether the kernel that computes the vector ``root`` reads the input ``name`` itself. Reads of a stored
    vector that depends on the input do not count."""
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
