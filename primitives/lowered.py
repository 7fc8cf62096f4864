"""What lowering gives: a text and what its kernels are called with; and what the two writers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primitives.cut import Steps
from primitives.ir import OPERATIONS, Program

CUTE_DTYPES = {"bf16": "cutlass.BFloat16", "fp16": "cutlass.Float16", "fp32": "Float32"}


@dataclass(frozen=True)
class Argument:
    """One tensor or number that a kernel takes: a node of the program under an invented name.

    ``packed``: 16-bit values, twice as wide as the GEMM, passed as 32-bit lanes.
    """

    name: str
    role: Literal["load", "store", "row", "column", "partial", "scalar", "vector", "out"]
    node: int
    dtype: str
    packed: bool = False


@dataclass(frozen=True)
class GemmKernel:
    """A step's class and what it is called with. ``c`` and ``d`` are the mainloop's own epilogue
    load and store; further ones are among ``arguments``."""

    step: int
    name: str
    a: int
    b: int
    a_transposed: bool
    b_transposed: bool
    dtype: str
    c: Argument | None
    d: Argument | None
    arguments: tuple[Argument, ...]
    half: bool  # stores a tile half as wide, which wants tile_n % 32 == 0


@dataclass(frozen=True)
class VectorKernel:
    """The kernel for the vectors that are final after ``step`` (-1: before all)."""

    step: int
    name: str
    length: int  # a node of the vectors' length
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Lowered:
    """``text`` is the product; the rest says how to call it, and follows from the program too."""

    text: str
    hash: str
    gemms: tuple[GemmKernel, ...]
    vectors: tuple[VectorKernel, ...]

    @property
    def module(self) -> str:
        return f"coda_lowered_{self.hash[:16]}"


def literal(value: float) -> str:
    """A Python number that reads back exactly; its hexadecimal form stands behind as a check."""
    if float(repr(value)).hex() != value.hex():
        raise ValueError(f"{value!r} does not survive printing")
    return f"({value!r})" if value < 0 else repr(value)


class Writer:
    """What both kinds of kernel share: names of values and the text of an operation."""

    def __init__(self, program: Program, steps: Steps):
        self.program, self.nodes, self.steps = program, program.nodes, steps

    def expression(self, index: int, values: list[str], exact: bool) -> str:
        operation = OPERATIONS[self.nodes[index].op]
        template = operation.cute if exact or operation.fast is None else operation.fast
        if template is None:
            raise ValueError(f"operation {operation.name} has no CuTeDSL text of its own")
        return template.format(*values)

    def constant(self, index: int) -> float:
        return float(str(self.nodes[index].attribute))

    def input_dtype(self, index: int) -> str:
        return self.program.signature.inputs[str(self.nodes[index].attribute)].dtype

    def vector_dtype(self, index: int) -> str:
        """Vectors in memory keep their input's or output's dtype; further ones are fp32."""
        return self.input_dtype(index) if self.nodes[index].op == "input" else self.output_dtype(index)

    def output_dtype(self, index: int) -> str:
        for name, node in self.program.outputs.items():
            if node == index:
                return self.program.signature.outputs[name].dtype
        return "fp32"
