"""Evaluate programs in fp64 without any rounding, so that derived gradients can be compared with
autograd's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from coda_agent.primitives.derive import Derived, all_sizes
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.primitives.lang.ir import OPERATIONS, Program, sizes_named

Tensors = Mapping[str, torch.Tensor]


def evaluate(program: Program, inputs: Tensors, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return a program's outputs, even if the program has no step. Autograd can differentiate through the
    evaluation."""
    types = program.types()
    values: list[torch.Tensor] = []
    for index, node in enumerate(program.nodes):
        given: list[Any] = []
        for argument in node.args:
            value, kind = values[argument], types[argument]
            if types[index].kind == "tile" and kind.period is not None:
                width, columns = kind.period(sizes), types[index].shape[1](sizes)
                if kind.kind == "spread":
                    value = value.repeat_interleave(width, dim=1)
                else:
                    value = value.repeat(*[1] * (value.dim() - 1), columns // width)
            given.append(value)
        if node.op == "input":
            value = inputs[str(node.attribute)]
        elif node.op == "constant":
            value = torch.tensor(node.attribute, dtype=torch.float64)
        elif node.op == "dim":
            value = torch.tensor(Dim.parse(str(node.attribute))(sizes), dtype=torch.float64)
        else:
            given += [Dim.parse(size)(sizes) for size in sizes_named(node)]
            meaning = OPERATIONS[node.op].torch
            assert meaning is not None
            value = meaning(torch, *given)
        values.append(value.double() if node.op != "input" or value.is_floating_point() else value)
    return {name: values[index] for name, index in program.outputs.items()}


def backward(
    program: Program, derived: Derived, memory: Tensors, sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return all gradients by name. ``memory`` holds the inputs and outputs of the forward program, and the
    gradients of these outputs."""
    known = dict(memory)
    if derived.saves:
        known |= evaluate(program._replace(outputs=dict(derived.saves)), memory, sizes)
    for part in (derived.head, derived.program):
        if part:
            shapes = {n: tuple(known[n].shape) for n in part.signature.inputs}
            own = solve_sizes(part.signature, shapes, sizes) if part is derived.program else {}
            known |= evaluate(part, known, all_sizes(derived, sizes) | own)
    known |= {name: known[other] for name, other in derived.same.items()}
    for name, parts in derived.folds.items():
        tensor = program.signature.inputs[name.removeprefix("d_")]
        if tensor.shape:
            known[name] = known[parts].unflatten(-1, (-1, tensor.shape[-1](sizes))).sum(-2)
        else:
            known[name] = known[parts].sum()
    return {name: known[name] for name in known.keys() - memory.keys() if name.startswith("d_")}


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest error, relative to the largest value of ``truth``."""
    return float((got - truth).abs().max() / truth.abs().max().clamp_min(1e-30))
