"""Interpret a program on tensors, in PyTorch, on any machine.

The interpreter computes the same values as the lowered kernel, and rounds at the same places. Only matmul
operands and values that leave their step are rounded. Each such value is rounded once, to the dtype in which
it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.lang.dims import Dim, solve
from coda_agent.primitives.lang.ir import OPERATIONS, Node, Program, sizes_named
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import EIGHTS, Signature
from coda_agent.primitives.lang.steps import GemmStep

if TYPE_CHECKING:
    import torch

Watch = Callable[[int, Sequence[Any], "torch.Tensor"], "torch.Tensor"]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype for a dtype's name in a signature."""
    import torch

    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int32": torch.int32,
        "int64": torch.int64,
    }[name]


def saturated(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Clamp values, including infinities, to the range of an fp8 dtype, as an fp8 store does. NaN stays NaN.
    Other dtypes keep all values."""
    import torch

    if dtype not in EIGHTS:
        return values
    end = torch.finfo(torch_dtype(dtype)).max
    return values.clamp(-end, end)


def rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round values once to a dtype. Values beyond the range of an fp8 dtype saturate."""
    return saturated(values, dtype).to(torch_dtype(dtype))


def solve_sizes(
    signature: Signature, shapes: Mapping[str, Sequence[int]], given: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """Solve for each dim's size from the inputs' shapes. Dims that no shape determines come from ``given``,
    which may contain other dims too. Raises ValueError if shapes or sizes do not fit the signature."""
    for dim in signature.named:
        if type(given.get(dim)) is not int or given[dim] < 1:
            raise ValueError(f"{dim} follows from no input's shape: give it by name, as a positive integer")
    sizes = solve(signature.shapes, signature.dims, shapes, {dim: given[dim] for dim in signature.named})
    for dim, allowed in signature.only.items():
        if sizes[dim] not in allowed:
            known = " or ".join(map(str, allowed))
            raise ValueError(f"{dim} is {sizes[dim]}; the spec of {signature.name} allows only {known}")
    return sizes


def interpret(
    program: Program,
    inputs: Mapping[str, torch.Tensor],
    watch: Watch | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
    *,
    wide: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Run a checked program on tensors of its inputs' shapes and dtypes. Return the outputs in their declared
    dtypes. ``wide``: fp32 or fp64; then all arithmetic is in this dtype, no value is rounded to a narrower
    one, and outputs have this dtype.

    Otherwise arithmetic is fp32 on the inputs' device, with fp32 accumulation. ``watch`` is called with the
    node, the arguments and the value of each computed operation or size. The interpreter continues with the
    value that ``watch`` returns. ``sizes`` gives the dims that no shape determines. Raises ValueError if
    shapes do not fit.
    """
    run = _Run(program, inputs, watch, sizes, wide)
    run.finish(-1)
    for step in run.steps.gemms:
        run.epilogue(step)
        run.finish(step.index)
    return {name: run.memory[index] for name, index in program.outputs.items()}


class _Run:
    """One run of a program, step by step. ``memory`` holds stored tensors in their dtypes, so a later step
    reads rounded values."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, torch.Tensor],
        watch: Watch | None,
        sizes: Mapping[str, int],
        wide: torch.dtype | None = None,
    ):
        import torch

        self.nodes, self.steps, self.watch, self.wide = program.nodes, cut(program), watch, wide
        self.arithmetic = wide or torch.float32
        self.types = self.steps.types
        self.sizes = solve_sizes(program.signature, {k: tuple(t.shape) for k, t in inputs.items()}, sizes)
        self.device = next(iter(inputs.values())).device
        self.memory = {i: inputs[str(n.attribute)] for i, n in enumerate(self.nodes) if n.op == "input"}
        self.reduced: dict[int, torch.Tensor] = {}
        self.scalars: dict[int, torch.Tensor] = {}
        for index, node in enumerate(self.nodes):
            if self.types[index].kind == "scalar":
                self.scalars[index] = self.scalar(index, node)

    def scalar(self, index: int, node: Node) -> torch.Tensor:
        import torch

        if node.op == "input":
            return self.memory[index].to(self.arithmetic)
        if node.op == "constant":
            return torch.tensor(node.attribute, dtype=self.arithmetic, device=self.device)
        if node.op == "dim":
            extent = Dim.parse(str(node.attribute))(self.sizes)
            return self.seen(index, [], torch.tensor(extent, dtype=self.arithmetic, device=self.device))
        return self.compute(index, self.scalars)

    def compute(self, index: int, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        import torch

        node = self.nodes[index]
        operation = OPERATIONS[node.op]
        meaning = operation.torch
        assert meaning is not None  # inputs, constants, dims and gemms are handled elsewhere
        arguments: list[torch.Tensor | int] = [self.met(a, index, values) for a in node.args]
        arguments += [Dim.parse(size)(self.sizes) for size in sizes_named(node)]
        return self.seen(index, arguments, meaning(torch, *arguments))

    def seen(self, index: int, arguments: Sequence[Any], value: torch.Tensor) -> torch.Tensor:
        return self.watch(index, arguments, value) if self.watch else value

    def met(self, index: int, reader: int, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return a value in the form that the node ``reader`` needs. If the reader is a tile, values per head
        are expanded to the tile's columns."""
        value, kind = values[index], self.types[index].kind
        if self.types[reader].kind != "tile" or kind not in ("spread", "repeated"):
            return value
        period, columns = self.types[index].period, self.types[reader].shape[1]
        assert period is not None  # spread and repeated values have a period
        width = period(self.sizes)
        if kind == "spread":
            return value.repeat_interleave(width, dim=1)
        return value.repeat(1, columns(self.sizes) // width)

    def write(self, index: int, value: torch.Tensor) -> None:
        dtype = self.steps.dtypes.get(index, "fp32")
        self.memory[index] = value.to(self.wide) if self.wide else rounded(value, dtype)

    def epilogue(self, step: GemmStep) -> None:
        """Compute one GEMM and its epilogue. Values are rounded only when they are stored."""
        values = dict(self.scalars)
        for index in step.loads:
            values[index] = self.memory[index].to(self.arithmetic)
        for index in (*step.vectors, *step.repeats):
            source = self.nodes[index].args[0]
            values[index] = self.compute(index, {source: self.memory[source].to(self.arithmetic)})
        for index in step.sweep:
            self.ride(index, values)
        for index in step.statistics:
            values[index] = self.compute(index, values)
        for index in step.body:
            self.ride(index, values)
        for index in step.stores:
            self.write(index, values[index])
        for index in step.reductions:
            tile, *others = self.nodes[index].args
            known = {tile: values[tile]} | {i: self.memory[i].to(self.arithmetic) for i in others}
            self.reduced[index] = self.compute(index, known)

    def ride(self, index: int, values: dict[int, torch.Tensor]) -> None:
        """Compute one value of the epilogue or of the sweep. The sweep is the pass over the accumulator that
        computes head statistics before the epilogue. Skip a value that ``values`` already contains."""
        import torch

        node = self.nodes[index]
        if index in values:
            return
        if node.op == "gemm":
            a, b, *offsets = node.args
            product, rows = OPERATIONS["gemm"].torch, [self.memory[i] for i in offsets]
            assert product is not None  # ops/tiles.py gives gemm a PyTorch function
            values[index] = product(torch, self.operand(a), self.operand(b), *rows)
        else:
            values[index] = self.compute(index, self.with_shapes(node, values))

    def with_shapes(self, node: Node, values: dict[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return ``values`` with zeros for the node's arguments that have no value. The node uses only the
        shapes of these arguments."""
        import torch

        missing = [a for a in node.args if a not in values]
        shapes = {a: [d(self.sizes) for d in self.types[a].shape] for a in missing}
        return values | {a: torch.zeros(1, device=self.device).expand(s) for a, s in shapes.items()}

    def operand(self, index: int) -> torch.Tensor:
        node = self.nodes[index]
        stored = self.memory[node.args[0] if node.op == "transpose" else index].to(self.arithmetic)
        return stored.mT if node.op == "transpose" else stored

    def finish(self, stage: int) -> None:
        """Compute the vectors that are stored after step ``stage`` (before all steps if ``stage`` is -1)."""
        wanted = self.steps.finishes.get(stage, ())
        values = self.scalars | self.reduced
        values |= {i: t.to(self.arithmetic) for i, t in self.memory.items() if self.types[i].kind == "vector"}
        for index, node in enumerate(self.nodes[: max(wanted, default=-1) + 1]):
            known = index in values or self.types[index].kind != "vector"
            if not known and all(a in values for a in node.args):
                values[index] = self.compute(index, values)
        for index in wanted:
            self.write(index, values[index])
