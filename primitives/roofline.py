"""Roofline: Program x sizes -> FLOPs, compulsory bytes, and the time below which no schedule gets.

FLOPs are the matmuls' 2*M*N*K. Epilogue arithmetic is left out: it runs on other pipes, beside the
tensor cores, so counting it could only lift the floor above what is possible. Bytes are compulsory
ones: each tensor that a step reads counts once, each that it writes once, and what passes between
steps is written by one and read by the other. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from primitives.cut import REDUCTIONS, GemmStep, Steps, cut
from primitives.finish import by_length
from primitives.interpret import store_dtypes
from primitives.ir import TILES, Program

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PARTIAL_BYTES = 4  # partial sums are fp32
WIDEST_TILE = max(n for _, n, _ in TILES)  # the fewest partials a row


@dataclass(frozen=True)
class Ceiling:
    """What hardware gives at most, in ``unit``, and where the number is from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Machine:
    """A GPU's ceilings. ``tensor``: dense 16-bit matmul with fp32 accumulation; ``cache``: the L2."""

    name: str
    tensor: Ceiling
    memory: Ceiling
    cache: Ceiling
    multiprocessors: Ceiling

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Datasheet peaks, not sustained rates: a floor that a cool chip could beat would be none.
H100 = Machine(
    "H100 SXM",
    Ceiling(989.4e12, "FLOP/s", "NVIDIA H100 datasheet, SXM: 1,979 TFLOPS bf16 sparse, half of it dense"),
    Ceiling(3.35e12, "B/s", "NVIDIA H100 datasheet, SXM: 3.35 TB/s of HBM3"),
    Ceiling(50 * 2**20, "B", "NVIDIA H100 architecture whitepaper, SXM5: 50 MB of L2"),
    Ceiling(132, "SMs", "NVIDIA H100 architecture whitepaper, SXM5"),
)


@dataclass(frozen=True)
class VectorStep:
    """Vectors of one length that one small kernel stores once GEMM step ``stage`` is done (-1: before all).

    ``partials``: reductions whose partial sums it adds up; ``vectors``: finished ones it reads;
    ``roots``: those it stores; ``body``: the nodes it computes, in order.
    """

    stage: int
    roots: tuple[int, ...]
    partials: tuple[int, ...]
    vectors: tuple[int, ...]
    body: tuple[int, ...]


def vector_steps(program: Program, steps: Steps) -> tuple[VectorStep, ...]:
    """The kernels between GEMM steps, by stage and then length."""
    found = []
    for stage, members in sorted(steps.finishes.items()):
        found += [_vector_step(program, steps, stage, tuple(roots)) for roots in by_length(steps, members)]
    return tuple(found)


def _vector_step(program: Program, steps: Steps, stage: int, roots: tuple[int, ...]) -> VectorStep:
    stored = {i for members in steps.finishes.values() for i in members}
    partials: set[int] = set()
    vectors: set[int] = set()
    body: set[int] = set()
    pending = list(roots)
    while pending:
        index = pending.pop()
        node = program.nodes[index]
        if node.op == "input" or (index in stored and index not in roots):
            vectors.add(index)
        elif node.op in REDUCTIONS:
            partials.add(index)
        elif steps.types[index].kind == "vector":
            body.add(index)
            pending.extend(node.args)
    return VectorStep(stage, roots, *(tuple(sorted(s)) for s in (partials, vectors, body)))


def operand_source(program: Program, operand: int) -> int:
    """The tile in memory behind a gemm's operand, which may be its transpose."""
    node = program.nodes[operand]
    return node.args[0] if node.op == "transpose" else operand


def memory_dtypes(program: Program) -> dict[int, str]:
    """The dtype of inputs, stored tiles and outputs; further vectors are fp32."""
    inputs = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}
    return store_dtypes(program) | {i: program.signature.inputs[name].dtype for i, name in inputs.items()}


def value_names(program: Program, steps: Steps) -> dict[int, str]:
    """Names of all that lies in memory: inputs' and outputs' own; ``t0``, ``v0`` for what passes between
    steps, ``partials0`` (by ``~node``) for reductions."""
    names = {i: str(n.attribute) for i, n in enumerate(program.nodes) if n.op == "input"}
    for name, index in sorted(program.outputs.items()):
        names.setdefault(index, name)
    tiles = sorted({i for s in steps.gemms for i in s.stores} - names.keys())
    vectors = sorted({i for members in steps.finishes.values() for i in members} - names.keys())
    reductions = sorted(~r for s in steps.gemms for r in s.reductions)[::-1]
    taken = {*program.signature.inputs, *program.signature.outputs}
    for prefix, indices in (("t", tiles), ("v", vectors), ("partials", reductions)):
        free = (n for n in (f"{prefix}{k}" for k in range(len(indices) + len(taken))) if n not in taken)
        names |= dict(zip(indices, free, strict=False))
    return names


@dataclass(frozen=True)
class StepFloor:
    """One kernel: GEMM step ``step``, or vectors finished after it.

    ``reads`` and ``writes`` are bytes by tensor; ``compute_seconds`` and ``memory_seconds`` what they
    take at the machine's ceilings.
    """

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
    """Every kernel of a program at given sizes, in the order they run; totals are sums over them.

    ``seconds`` takes every tensor through memory. The L2 can spare a part of that: what one kernel leaves
    there the next may read, and the last results may be there still when the clock stops. ``limit`` allows
    for both, so a measured time below it, from a cold L2, is wrong.
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
        """Seconds for the matmuls alone, or for fetching inputs and writing what the L2 cannot hold."""
        read = {name: size for s in self.steps for name, size in s.reads.items()}
        written = {name: size for s in self.steps for name, size in s.writes.items()}
        fetched = sum(size for name, size in read.items() if name not in written)
        left = sum(size for name, size in written.items() if name not in read)
        moved = fetched + max(0.0, left - self.machine.cache.value)
        return max(sum(s.compute_seconds for s in self.steps), moved / self.machine.memory.value)

    @property
    def binds(self) -> Literal["compute", "memory"]:
        """The term behind most of ``seconds``."""
        compute = sum(s.seconds for s in self.steps if s.binds == "compute")
        return "compute" if 2 * compute >= self.seconds else "memory"

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine.to_dict(), "sizes": dict(self.sizes), "flops": self.flops,
            "bytes": self.bytes, "seconds": self.seconds, "limit": self.limit, "binds": self.binds,
            "steps": [s.to_dict() for s in self.steps],
        }  # fmt: skip


def roofline(program: Program, sizes: Mapping[str, int], machine: Machine = H100) -> Roofline:
    """The floor of a checked program at ``sizes``. ValueError unless every dim has a positive size.

    Partials are those of the program's own schedule, else of the widest tile, which writes the fewest.
    """
    wrong = {d: sizes.get(d) for d in program.signature.dims if sizes.get(d, 0) < 1}
    if wrong:
        said = ", ".join(f"{d} is {'missing' if v is None else v}" for d, v in wrong.items())
        raise ValueError(
            f"sizes of {program.signature.name}: {said}; give each of "
            f"{', '.join(program.signature.dims)} a positive integer"
        )
    own = {d: sizes[d] for d in program.signature.dims}
    return Roofline(machine, own, _Counter(program, own, machine).steps())


class _Counter:
    def __init__(self, program: Program, sizes: Mapping[str, int], machine: Machine):
        self.program, self.sizes, self.machine = program, sizes, machine
        self.cut = cut(program)
        self.names = value_names(program, self.cut)
        self.dtypes = memory_dtypes(program)

    def extents(self, index: int) -> list[int]:
        return [d(self.sizes) for d in self.cut.types[index].shape]

    def size(self, index: int) -> int:
        """Bytes of a tensor in memory; of a reduction's partials for ``~node``."""
        if index < 0:
            return self.extents(~index)[0] * self.tiles(~index) * PARTIAL_BYTES
        count = ITEM_BYTES[self.dtypes.get(index, "fp32")]
        for extent in self.extents(index):
            count *= extent
        return count

    def tiles(self, reduction: int) -> int:
        """How many partials a row has: tiles along its GEMM's N."""
        step = next(s for s in self.cut.gemms if reduction in s.reductions)
        schedule = self.program.schedule.get(step.index)
        return -(-self.extents(step.gemm)[1] // (schedule.tile_n if schedule else WIDEST_TILE))

    def sized(self, indices: set[int]) -> dict[str, int]:
        return {self.names[i]: self.size(i) for i in sorted(indices, key=lambda i: self.names[i])}

    def steps(self) -> tuple[StepFloor, ...]:
        floors = [(float(s.index), self.gemm(s)) for s in self.cut.gemms]
        floors += [(v.stage + 0.5, self.vector(v)) for v in vector_steps(self.program, self.cut)]
        return tuple(floor for _, floor in sorted(floors, key=lambda f: f[0]))

    def gemm(self, step: GemmStep) -> StepFloor:
        nodes = self.program.nodes
        operands = nodes[step.gemm].args
        # Sets: an operand that the epilogue loads too need not be fetched twice.
        reads = {operand_source(self.program, o) for o in operands} | set(step.loads)
        reads |= {nodes[i].args[0] for i in step.vectors}
        writes = set(step.stores) | {~r for r in step.reductions}
        (rows, inner), columns = self.extents(operands[0]), self.extents(step.gemm)[1]
        return self.floor(step.index, "gemm", 2 * rows * columns * inner, reads, writes)

    def vector(self, step: VectorStep) -> StepFloor:
        reads = {~p for p in step.partials} | set(step.vectors)
        return self.floor(step.stage, "vector", 0, reads, set(step.roots))

    def floor(
        self, step: int, kind: Literal["gemm", "vector"], flops: int, reads: set[int], writes: set[int]
    ) -> StepFloor:
        read, written = self.sized(reads), self.sized(writes)
        total = sum(read.values()) + sum(written.values())
        return StepFloor(
            step,
            kind,
            flops,
            read,
            written,
            flops / self.machine.tensor.value,
            total / self.machine.memory.value,
        )
