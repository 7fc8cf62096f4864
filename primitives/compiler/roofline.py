"""Compute a program's roofline at given sizes: its FLOPs, its compulsory memory traffic and its least time.

The FLOPs of a matmul are 2*M*N*K. Epilogue arithmetic is not counted, because it can overlap with the tensor
cores' work. If it were counted, a kernel could be faster than the roofline. The traffic assumes that each
step reads each of its input tensors once, and writes each of its output tensors once. A tensor that repeats
over heads is also read once. A tensor between steps counts as written and as read. So does a buffer that the
program updates. This module needs only the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coda_agent.primitives.compiler.lowered import Writer
from coda_agent.primitives.compiler.vector_codegen import FinishWriter, finish_writers
from coda_agent.primitives.lang.assign_steps import untransposed
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Program, reduction
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import TILES
from coda_agent.primitives.lang.signature import OPERANDS
from coda_agent.primitives.lang.steps import GemmStep, Steps
from coda_agent.primitives.target import TARGET, Machine

ITEM_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "int64": 8}
PARTIAL_BYTES = 4  # partials are fp32
# The largest tile size in each dimension gives the fewest partial results.
LARGEST = {"tile_m": max(m for m, _, _ in TILES), "tile_n": max(n for _, n, _ in TILES)}
# a number of values; with the name of a tile size, the number of tiles that cover the values
Extent = tuple[Dim, Literal["tile_m", "tile_n"] | None]


def gemm_reads(program: Program, step: GemmStep) -> list[int]:
    """The nodes that a GEMM step reads from memory. A node is listed once, even if both the matmul and the
    epilogue read it."""
    nodes = program.nodes
    read = [untransposed(program, operand) for operand in nodes[step.gemm].args]
    read += step.loads
    read += [nodes[i].args[0] for i in (*step.vectors, *step.repeats)]
    read += [i for i in step.scalars if nodes[i].op == "input"]
    read += [nodes[r].args[1] for r in step.reductions if selects(program, r)]
    return list(dict.fromkeys(read))


def gemm_writes(step: GemmStep) -> list[int]:
    """The nodes that a GEMM step writes. ``~node`` stands for the partial results of the reduction
    ``node``."""
    return [*step.stores, *(~r for r in step.reductions)]


def vector_reads(kernel: FinishWriter) -> list[int]:
    """The nodes that a vector kernel, which runs between steps, reads from memory. Each node is listed once.
    ``~node`` stands for the partial results of the reduction ``node``."""
    given = [a for a in kernel.arguments if a.role in ("partial", "vector", "pointer")]
    return list(dict.fromkeys(~a.node if a.role == "partial" else a.node for a in given))


def vector_writes(kernel: FinishWriter) -> list[int]:
    """The nodes that a vector kernel writes: its vectors, and (as ``~node``) the buffers of selected values,
    which it resets."""
    return [*kernel.roots, *(~r for r in kernel.reductions if selects(kernel.program, r))]


def selects(program: Program, reduced: int) -> bool:
    """Whether a reduction selects one element per row. Such a reduction has one buffer with a value per row,
    instead of partial results per tile."""
    how = reduction(program.nodes[reduced])
    return how is not None and how.selects


def partial_shape(program: Program, steps: Steps, reduced: int) -> list[Extent]:
    """The extents of a reduction's partial results. A row reduction has one result for each row and each tile
    along N. A column reduction has one result for each column and each tile along M, or two results if the
    reduced tile is twice as wide as the GEMM. A selection has one value per row."""
    step = next(s for s in steps.gemms if reduced in s.reductions)
    rows, columns = steps.types[step.gemm].shape
    how, tile = reduction(program.nodes[reduced]), program.nodes[reduced].args[0]
    if how is not None and how.axis == "column":
        twice: list[Extent] = [(Dim.parse(2), None)] if steps.width[step.index, tile] == 2 else []
        return [*twice, (rows, "tile_m"), (columns, None)]
    return [(rows, None)] if selects(program, reduced) else [(rows, None), (columns, "tile_n")]


def value_names(program: Program, steps: Steps) -> dict[int, str]:
    """Name all tensors in memory; return the names by node. Inputs and outputs keep their names. Tiles
    between steps are named ``t0``, ``t1`` and so on; vectors between steps are named ``v0``, ``v1`` and so
    on. A reduction's partial results are named ``partials0``, and its selected values ``selected0``. Their
    key is ``~node``."""
    names = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}
    for name, index in sorted(program.outputs.items()):
        names.setdefault(index, name)
    reductions = sorted(r for s in steps.gemms for r in s.reductions)
    invented = {
        "t": sorted({i for s in steps.gemms for i in s.stores} - names.keys()),
        "v": sorted(steps.vectors - names.keys()),
        "partials": [~r for r in reductions if not selects(program, r)],
        "selected": [~r for r in reductions if selects(program, r)],
    }
    taken = {*program.signature.inputs, *program.signature.outputs}
    for prefix, indices in invented.items():
        free = (n for n in (f"{prefix}{k}" for k in range(len(indices) + len(taken))) if n not in taken)
        names |= dict(zip(indices, free, strict=False))
    return names


@dataclass(frozen=True)
class StepFloor:
    """The traffic and the least time of one kernel. The kernel is the GEMM of step ``step``, or a vector
    kernel that runs after this GEMM. A vector kernel of step -1 runs before all GEMMs."""

    step: int
    kind: Literal["gemm", "vector"]
    flops: int
    reads: dict[str, int]
    writes: dict[str, int]
    compute_seconds: float
    memory_seconds: float

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def binds(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "kind": self.kind, "flops": self.flops, "bytes": self.bytes,
            "reads": dict(self.reads), "writes": dict(self.writes),
            "compute_seconds": self.compute_seconds, "memory_seconds": self.memory_seconds,
            "seconds": self.seconds, "binds": self.binds,
        }  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """The least times of all kernels of a program at given sizes, in launch order, and the totals.

    ``seconds`` assumes that every tensor moves through memory. In fact, the L2 can save some of this traffic.
    A kernel may read its predecessor's results from the L2. The last results may still be in the L2 when the
    timing ends. ``limit`` leaves out the traffic that the L2 can save. So if a timing begins with a cold L2
    and gives less than ``limit``, the measurement is wrong.
    """

    machine: Machine
    sizes: dict[str, int]
    steps: tuple[StepFloor, ...]

    @property
    def flops(self) -> int:
        return sum(s.flops for s in self.steps)

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.steps)

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.steps)

    @property
    def limit(self) -> float:
        """The longer of two times: the time of the matmuls, and the time to read the inputs and to write the
        outputs, without the part of the outputs that can stay in the L2."""
        read = {name: size for s in self.steps for name, size in s.reads.items()}
        written = {name: size for s in self.steps for name, size in s.writes.items()}
        fetched = sum(size for name, size in read.items() if name not in written)
        left = sum(size for name, size in written.items() if name not in read)
        moved = fetched + max(0.0, left - self.machine.cache.value)
        return max(sum(s.compute_seconds for s in self.steps), moved / self.machine.memory.value)

    @property
    def binds(self) -> Literal["compute", "memory"]:
        """Whether compute-bound or memory-bound kernels take more of ``seconds``."""
        compute = sum(s.seconds for s in self.steps if s.binds == "compute")
        return "compute" if 2 * compute >= self.seconds else "memory"

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine.to_dict(), "sizes": dict(self.sizes), "flops": self.flops,
            "bytes": self.bytes, "seconds": self.seconds, "limit": self.limit, "binds": self.binds,
            "steps": [s.to_dict() for s in self.steps],
        }  # fmt: skip


def roofline(program: Program, sizes: Mapping[str, int], machine: Machine = TARGET.machine) -> Roofline:
    """Compute the roofline of a checked program at ``sizes``. Raises ValueError if a dim has no positive
    size.

    The number of a step's partial results depends on the CTA tile. It is counted for the tile of the
    program's own schedule for the step. Without such a schedule, it is counted for the largest tile, which
    gives the fewest partial results.
    """
    wrong = {d: sizes.get(d) for d in program.signature.dims if sizes.get(d, 0) < 1}
    if wrong:
        said = ", ".join(f"{d} is {'missing' if v is None else v}" for d, v in wrong.items())
        raise ValueError(
            f"sizes of {program.signature.name}: {said}; give each of "
            f"{', '.join(program.signature.dims)} a positive integer"
        )
    own = {d: sizes[d] for d in program.signature.dims}
    return Roofline(machine, own, _Counter(program, own, machine).floors())


class _Counter(Writer):
    def __init__(self, program: Program, sizes: Mapping[str, int], machine: Machine):
        super().__init__(program, cut(program))
        self.sizes, self.machine = sizes, machine
        self.names = value_names(program, self.steps)

    def extents(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self.steps.types[index].shape]

    def size(self, index: int) -> int:
        """The bytes of a node's tensor in memory; for ``~node``, the bytes of the partial results of
        reduction ``node``."""
        if index < 0:
            return PARTIAL_BYTES * math.prod(self.partial_extents(~index))
        return ITEM_BYTES[self.dtype(index)] * math.prod(self.extents(index))

    def partial_extents(self, reduced: int) -> list[int]:
        step = next(s.index for s in self.steps.gemms if reduced in s.reductions)
        schedule = self.program.schedule.get(step)
        tiles: Mapping[str, int] = schedule._asdict() if schedule else LARGEST
        shape = partial_shape(self.program, self.steps, reduced)
        return [-(-dim(self.sizes) // (tiles[tile] if tile else 1)) for dim, tile in shape]

    def sized(self, indices: list[int]) -> dict[str, int]:
        return {self.names[i]: self.size(i) for i in sorted(indices, key=lambda i: self.names[i])}

    def floors(self) -> tuple[StepFloor, ...]:
        found = [(float(s.index), self.gemm(s)) for s in self.steps.gemms]
        found += [(v.stage + 0.5, self.vector(v)) for v in finish_writers(self.program, self.steps)]
        return tuple(floor for _, floor in sorted(found, key=lambda f: f[0]))

    def gemm(self, step: GemmStep) -> StepFloor:
        node = self.nodes[step.gemm]
        operands = node.args
        (held, inner), columns = self.extents(operands[0]), self.extents(step.gemm)[-1]
        rows = self.extents(step.gemm)[0] if node.row_index is not None else held
        fp8 = self.dtype(untransposed(self.program, operands[0])) in OPERANDS
        flops, peak = 2 * rows * columns * inner, self.machine.tensor_fp8 if fp8 else self.machine.tensor
        read, written = self.sized(gemm_reads(self.program, step)), self.sized(gemm_writes(step))
        if node.offsets is not None and len(self.extents(operands[1])) == 3:
            # The matrix of an expert without rows is not read, so at most ``rows`` matrices are read.
            experts, weight = self.extents(operands[1])[0], untransposed(self.program, operands[1])
            read[self.names[weight]] = read[self.names[weight]] // experts * min(experts, rows)
        if node.row_index is not None:  # only the rows that the index names are read
            read[self.names[operands[0]]] = read[self.names[operands[0]]] // held * min(held, rows)
        return self.floor(step.index, "gemm", flops, flops / peak.value, read, written)

    def vector(self, kernel: FinishWriter) -> StepFloor:
        read, written = self.sized(vector_reads(kernel)), self.sized(vector_writes(kernel))
        return self.floor(kernel.stage, "vector", 0, 0.0, read, written)

    def floor(
        self,
        step: int,
        kind: Literal["gemm", "vector"],
        flops: int,
        seconds: float,
        read: dict[str, int],
        written: dict[str, int],
    ) -> StepFloor:
        moved = sum(read.values()) + sum(written.values())
        return StepFloor(step, kind, flops, read, written, seconds, moved / self.machine.memory.value)
