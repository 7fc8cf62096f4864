"""Evaluate programs without a matmul as PyTorch code, which torch.compile can fuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import OPERATIONS, Program, sizes_named


def evaluate(
    program: Program, inputs: Mapping[str, Any], sizes: Mapping[str, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The outputs, computed in fp32; matrices are rounded once, to ``dtype``."""
    types = program.types()
    values: list[Any] = []
    for index, node in enumerate(program.nodes):
        operation = OPERATIONS[node.op]
        if node.op == "input":
            value = inputs[str(node.attribute)]
            values.append(value.float() if isinstance(value, Tensor) and value.is_floating_point() else value)
        elif node.op == "constant":
            values.append(node.attribute)
        elif node.op == "dim":
            values.append(Dim.parse(str(node.attribute)).value(sizes))
        else:
            given = [_met(program, types, a, index, values, sizes) for a in node.args]
            given += [Dim.parse(size).value(sizes) for size in sizes_named(node)]
            assert operation.torch is not None  # a product cannot occur here
            values.append(operation.torch(torch, *given))
    return {
        name: values[i].to(dtype if types[i].kind == "tile" else torch_dtype("fp32"))
        for name, i in program.outputs.items()
    }


def _met(
    program: Program, types: Any, argument: int, reader: int, values: list[Any], sizes: Mapping[str, int]
) -> Any:
    """A value as its reader needs it. For a tile, a vector with one value per head, or with one head's
    values, is repeated over all columns."""
    value, kind = values[argument], types[argument]
    if types[reader].kind != "tile" or kind.kind not in ("spread", "repeated"):
        return value
    width = kind.period.value(sizes)
    if kind.kind == "spread":
        return value.repeat_interleave(width, dim=1)
    return value.repeat(1, types[reader].shape[1].value(sizes) // width)
