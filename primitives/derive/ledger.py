"""Count bytes and FLOPs of a program from its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from coda_agent.primitives.compiler.roofline import ITEM_BYTES
from coda_agent.primitives.lang.assign_steps import untransposed
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut


class Ledger(NamedTuple):
    """``moved``: bytes if each step reads each of its tensors once. ``least``: each input and output once."""

    moved: int
    least: int
    flops: int


def size(shape: tuple[Dim, ...], sizes: Mapping[str, int]) -> int:
    """The number of elements of a shape."""
    total = 1
    for dim in shape:
        total *= dim(sizes)
    return total


def count(program: Program, sizes: Mapping[str, int]) -> Ledger:
    """The ledger of a program with a valid partition, at these sizes."""
    steps = cut(program)

    def stored(index: int) -> int:
        tensor = program.input_tensor(index)
        dtype = tensor.dtype if tensor else steps.dtypes.get(index, "fp32")
        return size(steps.types[index].shape, sizes) * ITEM_BYTES[dtype]

    moved = flops = 0
    for step in steps.gemms:
        operands = [untransposed(program, a) for a in program.nodes[step.gemm].args]
        vectors = [program.nodes[i].args[0] for i in (*step.vectors, *step.repeats)]
        moved += sum(map(stored, {*operands, *step.loads, *vectors}))
        moved += sum(map(stored, step.stores))
        inner = program.nodes[step.gemm].args[0]
        flops += 2 * size(steps.types[step.gemm].shape, sizes) * steps.types[inner].shape[1](sizes)
    moved += sum(stored(i) for several in steps.finishes.values() for i in several)
    return Ledger(moved, least(program, sizes), flops)


def least(program: Program, sizes: Mapping[str, int]) -> int:
    """Bytes of each input that is read and of each output, once."""
    signature = program.signature
    tensors = [*signature.inputs.values(), *signature.outputs.values()]
    return sum(size(t.shape, sizes) * ITEM_BYTES[t.dtype] for t in tensors)
