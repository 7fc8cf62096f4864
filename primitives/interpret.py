"""The interpreter: Program x tensors -> tensors, in PyTorch, on any machine.

It computes what the lowered kernel computes, rounding where that rounds: operands and tiles that
leave their step, once, in the dtype they are stored in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from primitives.cut import GemmStep, cut, materialised
from primitives.dims import Dim, solve
from primitives.ir import OPERATIONS, Node, Program, Signature

if TYPE_CHECKING:
    import torch


def torch_dtype(name: str) -> torch.dtype:
    """bf16, fp16, fp32 -> torch's dtype."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def solve_sizes(signature: Signature, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Each dim's value from the inputs' shapes. ValueError where they do not fit the signature."""
    return solve({name: t.shape for name, t in signature.inputs.items()}, signature.dims, shapes)


def store_dtypes(program: Program) -> dict[int, str]:
    """The dtype in which each tile that leaves its step is stored: its output's, else the other
    operand's of the gemm that reads it."""
    steps = cut(program)
    dtypes: dict[int, str] = {}
    for name, index in program.outputs.items():
        dtypes.setdefault(index, program.signature.outputs[name].dtype)
    for index in sorted(materialised(steps, program.nodes)):
        dtypes.setdefault(index, _operand_dtype(program))
    return dtypes


def _operand_dtype(program: Program) -> str:
    """The 16-bit dtype that the program's GEMMs read from inputs."""
    for node in program.nodes:
        if node.op == "gemm":
            for argument in node.args:
                source = program.nodes[argument]
                source = program.nodes[source.args[0]] if source.op == "transpose" else source
                if source.op == "input":
                    return program.signature.inputs[str(source.attribute)].dtype
    return "bf16"


def interpret(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a checked program on tensors of its inputs' shapes and dtypes; outputs in theirs.

    Arithmetic is fp32 on the inputs' device, with fp32 accumulation. ValueError if shapes do not fit.
    """
    run = _Run(program, inputs)
    run.finish(-1)
    for step in run.steps.gemms:
        run.epilogue(step)
        run.finish(step.index)
    return {name: run.memory[index] for name, index in program.outputs.items()}


class _Run:
    """Steps in order. ``memory`` holds what lies there, in its dtype: a later step reads it rounded."""

    def __init__(self, program: Program, inputs: Mapping[str, torch.Tensor]):
        self.nodes, self.steps, self.dtypes = program.nodes, cut(program), store_dtypes(program)
        self.sizes = solve_sizes(program.signature, {k: tuple(t.shape) for k, t in inputs.items()})
        self.device = next(iter(inputs.values())).device
        self.memory = {i: inputs[str(n.attribute)] for i, n in enumerate(self.nodes) if n.op == "input"}
        self.sums: dict[int, torch.Tensor] = {}
        self.scalars: dict[int, torch.Tensor] = {}
        for index, node in enumerate(self.nodes):
            if self.steps.types[index].kind == "scalar":
                self.scalars[index] = self.scalar(node)

    def scalar(self, node: Node) -> torch.Tensor:
        import torch

        if node.op == "constant":
            return torch.tensor(node.attribute, dtype=torch.float32, device=self.device)
        if node.op == "dim":
            extent = Dim.parse(str(node.attribute))(self.sizes)
            return torch.tensor(extent, dtype=torch.float32, device=self.device)
        return self.compute(node, self.scalars)

    @staticmethod
    def compute(node: Node, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        import torch

        meaning = OPERATIONS[node.op].torch
        assert meaning is not None  # inputs, constants, dims and gemms are treated apart
        result: torch.Tensor = meaning(torch, *(values[a] for a in node.args))
        return result

    def write(self, index: int, value: torch.Tensor) -> None:
        self.memory[index] = value.to(torch_dtype(self.dtypes.get(index, "fp32")))

    def epilogue(self, step: GemmStep) -> None:
        """One GEMM and all that rides on it, unrounded until it is stored."""
        values = dict(self.scalars)
        for index in step.loads:
            values[index] = self.memory[index].float()
        for index in step.vectors:
            vector = self.nodes[index].args[0]
            values[index] = self.compute(self.nodes[index], {vector: self.memory[vector].float()})
        for index in step.body:
            node = self.nodes[index]
            if node.op == "gemm":
                a, b = (self.operand(i) for i in node.args)
                values[index] = a @ b
            else:
                values[index] = self.compute(node, values)
        for index in step.stores:
            self.write(index, values[index])
        for index in step.reductions:
            self.sums[index] = self.compute(self.nodes[index], values)

    def operand(self, index: int) -> torch.Tensor:
        node = self.nodes[index]
        return self.memory[node.args[0]].float().mT if node.op == "transpose" else self.memory[index].float()

    def finish(self, stage: int) -> None:
        """The vectors that are stored once step ``stage`` is done."""
        wanted = self.steps.finishes.get(stage, ())
        values = self.scalars | self.sums
        values |= {i: t.float() for i, t in self.memory.items() if t.ndim == 1}
        for index, node in enumerate(self.nodes[: max(wanted, default=-1) + 1]):
            known = index in values or self.steps.types[index].kind != "vector"
            if not known and all(a in values for a in node.args):
                values[index] = self.compute(node, values)
        for index in wanted:
            self.write(index, values[index])
