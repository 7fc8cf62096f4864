"""Evaluate a program's nodes in order in plain fp64, without rounding and without partitioning.

This module shares no code with the verifier's interpreter. So a mistake in this module or in the interpreter
shows up as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import Node, Program
from coda_agent.primitives.lang.signature import Type

Values = list[Tensor]
ROOT_2_OVER_PI = 0.7978845608028654


def _gelu(a: Tensor) -> Tensor:
    return 0.5 * a * (1 + torch.tanh(ROOT_2_OVER_PI * (a + 0.044715 * a * a * a)))


def _select(t: Tensor, index: Tensor) -> Tensor:
    hit = torch.arange(t.shape[1], dtype=torch.float64) == index[:, None]
    return torch.where(hit, t, 0.0).sum(1)


def _joined(even: Tensor, odd: Tensor) -> Tensor:
    whole = even.new_empty(even.shape[0], 2 * even.shape[1])
    whole[:, 0::2], whole[:, 1::2] = even, odd
    return whole


def _columns(t: Tensor) -> Tensor:
    return torch.arange(t.shape[1], dtype=torch.float64).expand(t.shape)


def _within(t: Tensor, first: int, width: int) -> Tensor:
    place = _columns(t)
    return ((place >= first) & (place < first + width)).double()


def _heads(t: Tensor, width: int) -> Tensor:
    return t.reshape(t.shape[0], -1, width)


def _product(a: Tensor, b: Tensor, offsets: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """A matmul. With offsets, one matmul per expert: the expert's rows of ``a`` times the expert's matrix, or
    the expert's columns of ``a`` times the expert's rows of ``b``. ``index``: the rows of ``a`` that are
    gathered before the matmul."""
    if offsets is None:
        return a @ b
    if index is not None:
        a = a[index.long()]
    ranges = [slice(int(first), int(end)) for first, end in zip(offsets, offsets[1:], strict=False)]
    if b.dim() == 3:
        return torch.cat([a[rows] @ own for rows, own in zip(ranges, b, strict=True)])
    return torch.stack([a[:, rows] @ b[rows] for rows in ranges])


MEANINGS: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negative": lambda a: -a,
    "greater": lambda a, b: (a > b).double(),
    "greater_equal": lambda a, b: (a >= b).double(),
    "less": lambda a, b: (a < b).double(),
    "less_equal": lambda a, b: (a <= b).double(),
    "equal": lambda a, b: (a == b).double(),
    "not_equal": lambda a, b: (a != b).double(),
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": lambda a: 1 / torch.sqrt(a),
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "sigmoid": torch.sigmoid,
    "silu": lambda a: a * torch.sigmoid(a),
    "gelu": _gelu,
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
    "as_tile": lambda a, t: a.broadcast_to(t.shape),
    "per_row": lambda v: v[:, None],
    "per_column": lambda v: v[None, :],
    "per_head": lambda v: v,
    "transpose": lambda a: a.mT,
    "gemm": _product,
    "even": lambda a: a[..., 0::2],
    "odd": lambda a: a[..., 1::2],
    "join": _joined,
    "column_index": _columns,
    "row_sums": lambda t: t.sum(1),
    "row_max": lambda t: t.amax(1),
    "row_abs_max": lambda t: t.abs().amax(1),
    "column_sums": lambda t: t.sum(0),
    "column_max": lambda t: t.amax(0),
    "column_abs_max": lambda t: t.abs().amax(0),
    "row_logsumexp": lambda t: torch.logsumexp(t, 1),
    "row_select": _select,
    "head_sums": lambda t, width: _heads(t, width).sum(2),
    "head_abs_max": lambda t, width: _heads(t, width).abs().amax(2),
    "column_range": lambda t, first, width: t[:, first : first + width],
    "in_columns": _within,
}
LEAVES = ("input", "constant", "dim")
SIZED = ("head_sums", "head_abs_max", "column_range", "in_columns")  # operations with sizes as attribute


def values(program: Program, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Values:
    """Compute the value of every node, in the program's order."""
    types, found = program.types(), Values()
    for node, kind in zip(program.nodes, types, strict=True):
        if node.op in LEAVES:
            found.append(_leaf(node, inputs, sizes))
            continue
        given = [_met(found[a], types[a], kind, sizes) for a in node.args]
        found.append(MEANINGS[node.op](*given, *_sizes(node, sizes)))
    return found


def outputs(program: Program, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Compute the program's outputs in fp64, by name."""
    found = values(program, inputs, sizes)
    shapes = {n: [d(sizes) for d in t.shape] for n, t in program.signature.outputs.items()}
    return {name: found[index].broadcast_to(shapes[name]) for name, index in program.outputs.items()}


def _sizes(node: Node, sizes: Mapping[str, int]) -> list[int]:
    return [Dim.parse(part)(sizes) for part in str(node.attribute).split(", ")] if node.op in SIZED else []


def _leaf(node: Node, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    attribute: Any = node.attribute
    match node.op:
        case "input":
            return inputs[attribute].double()
        case "constant":
            return torch.tensor(attribute, dtype=torch.float64)
    return torch.tensor(Dim.parse(attribute)(sizes), dtype=torch.float64)


def _met(value: Tensor, kind: Type, reader: Type, sizes: Mapping[str, int]) -> Tensor:
    """Return a value in the shape that its reader (the node that uses it) needs. If the reader's result is a
    tile, a value with one number per head is spread over each head's columns. A value with one head's columns
    is repeated for all heads."""
    if reader.kind != "tile" or kind.period is None or kind.kind not in ("spread", "repeated"):
        return value
    width = kind.period(sizes)
    if kind.kind == "spread":
        return value.repeat_interleave(width, 1)
    return value.repeat(1, reader.shape[1](sizes) // width)
