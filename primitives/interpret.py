"""The interpreter: Program x tensors -> tensors, in PyTorch, on any machine.

It computes what the lowered kernel computes, rounding where that rounds: operands and tiles that
leave their step, once, in the dtype they are stored in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from primitives.cut import cut, materialised
from primitives.dims import Dim
from primitives.ir import OPERATIONS, Program, Signature

if TYPE_CHECKING:
    import torch


def torch_dtype(name: str) -> torch.dtype:
    """bf16, fp16, fp32 -> torch's dtype."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def solve_sizes(signature: Signature, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Each dim's value from the inputs' shapes. ValueError where they do not fit the signature."""
    sizes: dict[str, int] = {}
    for name, tensor in signature.inputs.items():
        for dim, extent in zip(tensor.shape, shapes[name], strict=True):
            if str(dim) in signature.dims:
                sizes.setdefault(str(dim), extent)
    for name, tensor in signature.inputs.items():
        for dim, extent in zip(tensor.shape, shapes[name], strict=True):
            _solve_multiple(dim, extent, sizes)
            if dim(sizes) != extent:
                raise ValueError(f"input {name!r} is {tuple(shapes[name])}, but its shape "
                                 f"[{', '.join(map(str, tensor.shape))}] would be {[d(sizes) for d in tensor.shape]}")
    return sizes


def _solve_multiple(dim: Dim, extent: int, sizes: dict[str, int]) -> None:
    """A dim that occurs only as a multiple, such as 2*F."""
    if len(dim.terms) == 1 and len(dim.terms[0][0]) == 1:
        (monomial, coefficient) = dim.terms[0]
        sizes.setdefault(monomial[0], extent // coefficient)


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
    import torch

    signature = program.signature
    sizes = solve_sizes(signature, {k: tuple(t.shape) for k, t in inputs.items()})
    rounds = store_dtypes(program)
    read_back = materialised(cut(program), program.nodes)
    values: list[Any] = []
    for index, node in enumerate(program.nodes):
        arguments = [values[a] for a in node.args]
        value: Any
        if node.op == "input":
            value = inputs[str(node.attribute)].float()
        elif node.op == "constant":
            value = node.attribute
        elif node.op == "dim":
            value = float(Dim.parse(str(node.attribute))(sizes))
        elif node.op == "gemm":
            rounded = [_round(program, values, a, rounds, read_back) for a in node.args]
            value = rounded[0] @ rounded[1]
        else:
            meaning = OPERATIONS[node.op].torch
            assert meaning is not None  # every other operation has one
            value = meaning(torch, *arguments)
        values.append(value)
    return {
        name: values[index].to(torch_dtype(signature.outputs[name].dtype))
        for name, index in program.outputs.items()
    }


def _round(program: Program, values: list[Any], operand: int, rounds: dict[int, str], read_back: set[int]) -> Any:
    node = program.nodes[operand]
    source = node.args[0] if node.op == "transpose" else operand
    value = values[source]
    if source in read_back:
        value = value.to(torch_dtype(rounds[source])).float()
    return value.mT if node.op == "transpose" else value
