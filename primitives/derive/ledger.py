"""Count the FLOPs of a backward, and the bytes that it moves. A backward has a program of matmuls and a
pointwise head."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from coda_agent.primitives.compiler.roofline import ITEM_BYTES, roofline
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import TensorType


class Traffic(NamedTuple):
    """The cost of a backward. ``moved``: the bytes if each step reads and writes each of its tensors once.
    ``least``: the bytes if one kernel computed the whole backward. This kernel would read each input once and
    write each output once."""

    moved: int
    least: int
    flops: int


def size(tensors: Collection[TensorType], sizes: Mapping[str, int]) -> int:
    """The bytes of these tensors in memory."""
    return sum(math.prod(d(sizes) for d in t.shape) * ITEM_BYTES[t.dtype] for t in tensors)


def count(program: Program | None, head: Program | None, sizes: Mapping[str, int]) -> Traffic:
    """The traffic of a backward. ``program``: the backward's matmuls. ``head``: its pointwise part, which is
    assumed to read and write each of its tensors once."""
    moved = flops = 0
    read: dict[str, TensorType] = {}
    written: dict[str, TensorType] = {}
    for part in (head, program):
        if part:
            read |= part.signature.inputs
            written |= part.signature.outputs
    if head:
        moved += size([*head.signature.inputs.values(), *head.signature.outputs.values()], sizes)
    if program:
        floor = roofline(program, sizes)
        moved, flops = moved + floor.bytes, floor.flops
    between = read.keys() & written.keys()
    ends = [t for tensors in (read, written) for n, t in tensors.items() if n not in between]
    return Traffic(moved, size(ends, sizes), flops)
