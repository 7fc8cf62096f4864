"""The meaning of a kernel file without the tracer: its source runs on fp64 values, and nothing is rounded.

This implementation is independent of ``primitives``, so tests compare the two. Both implementations run the
same kernel file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from merged import MERGED

from coda_agent.primitives.lang.signature import Signature

Tensors = dict[str, torch.Tensor]


class Eager:
    """A value in fp64. ``head`` is "statistic" for a statistic of heads, "spread" for such a statistic after
    ``per_head``, "repeated" for another value after ``per_head``, and "" for a plain value. In
    a tile, each column of a "spread" value fills one head; all heads contain the same "repeated" value."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: torch.Tensor, head: str = ""):
        self.value, self.head = value, head

    @property
    def mT(self) -> Eager:
        return Eager(self.value.mT)

    @property
    def rows(self) -> float:
        return float(self.value.shape[0])

    @property
    def columns(self) -> float:
        return float(self.value.shape[1])

    def over(self, columns: int) -> torch.Tensor:
        """Return the value as it enters a tile with ``columns`` columns."""
        if not self.head:
            return self.value
        count = columns // self.value.shape[-1]
        if self.head == "spread":
            return self.value.repeat_interleave(count, dim=1)
        return torch.cat([self.value] * count, dim=-1)


def calculate(function: Any) -> Any:
    """Make an elementwise PyTorch function accept ``Eager`` values and numbers."""

    def apply(*args: Any) -> Eager:
        given = [a if isinstance(a, Eager) else Eager(torch.tensor(a, dtype=torch.float64)) for a in args]
        plain = [a for a in given if not a.head and a.value.ndim == 2 and a.value.shape[1] > 1]
        heads = {a.head for a in given} - {""}
        if heads and plain and "statistic" not in heads:
            columns = max(a.value.shape[1] for a in plain)
            return Eager(function(*(a.over(columns) for a in given)))
        return Eager(function(*(a.value for a in given)), heads.pop() if heads else "")

    return apply


def _compare(function: Any) -> Any:
    return calculate(lambda a, b: function(a, b).double())


def _swapped(function: Any) -> Any:
    return lambda a, b: function(b, a)


for _name, _function in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div,
}.items():  # fmt: skip
    setattr(Eager, f"__{_name}__", calculate(_function))
    setattr(Eager, f"__r{_name}__", _swapped(calculate(_function)))
for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    setattr(Eager, f"__{_name}__", _compare(getattr(torch, _name)))
setattr(Eager, "__neg__", calculate(torch.neg))  # noqa: B010  (as those above)
setattr(Eager, "__pow__", calculate(lambda a, b: a**b))  # noqa: B010


def _gemm(a: Eager, b: Eager, offsets: Eager | None = None, index: Eager | None = None) -> Eager:
    """Return the product of ``a`` and ``b``. With offsets, each token belongs to an expert. If ``b`` has one
    matrix per expert, multiply each token's row of ``a`` by its expert's matrix. Otherwise return one matrix
    per expert, summed over the expert's tokens. ``index`` selects rows of ``a``."""
    if index is not None:
        a = Eager(torch.stack([a.value[token] for token in index.value.long().tolist()]))
    if offsets is None:
        return Eager(a.value @ b.value)
    counts = offsets.value.diff().long()
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    if b.value.ndim == 3:
        return Eager(torch.einsum("tk,tkn->tn", a.value, b.value[expert]))
    made = torch.zeros(len(counts), len(a.value), b.value.shape[1], dtype=torch.float64)
    return Eager(made.index_add(0, expert, torch.einsum("mt,tn->tmn", a.value, b.value)))


def _pairs(t: Eager) -> tuple[Eager, Eager]:
    return Eager(t.value[..., 0::2], t.head), Eager(t.value[..., 1::2], t.head)


def _join(a: Eager, b: Eager) -> Eager:
    joined = a.value.new_empty(a.value.shape[0], 2 * a.value.shape[1])
    joined[:, 0::2], joined[:, 1::2] = a.value, b.value
    return Eager(joined)


def _per_head(v: Eager) -> Eager:
    return Eager(v.value, "spread" if v.head == "statistic" else "repeated")


def _head_sums(t: Eager, width: Any) -> Eager:
    rows, columns = t.value.shape
    width = int(width.value if isinstance(width, Eager) else width)
    return Eager(t.value.reshape(rows, columns // width, width).sum(2), "statistic")


def _between(t: Eager, first: Any, width: Any) -> slice:
    start, wide = (int(n.value if isinstance(n, Eager) else n) for n in (first, width))
    return slice(start, start + wide)


def _in_columns(t: Eager, first: Any, width: Any) -> Eager:
    mask = torch.zeros_like(t.value)
    mask[:, _between(t, first, width)] = 1
    return Eager(mask)


def _head_abs_max(t: Eager, width: Any) -> Eager:
    rows, columns = t.value.shape
    width = int(width.value if isinstance(width, Eager) else width)
    return Eager(t.value.reshape(rows, columns // width, width).norm(math.inf, 2), "statistic")


def _rope(t: Eager, positions: Eager, inverse: Eager) -> Eager:
    even, odd = t.value[:, 0::2], t.value[:, 1::2]
    angles = torch.outer(positions.value, inverse.value)
    turned = torch.complex(even, odd) * torch.polar(
        torch.ones_like(angles), angles
    ).repeat(1, even.shape[1] // angles.shape[1])  # fmt: skip
    return Eager(torch.view_as_real(turned).flatten(1))


def _row_select(t: Eager, index: Eager) -> Eager:
    rows = [
        float(row[int(i)]) if 0 <= i < len(row) else 0.0 for row, i in zip(t.value, index.value, strict=True)
    ]
    return Eager(torch.tensor(rows, dtype=torch.float64))


def _of(function: Any) -> Any:
    return lambda t: Eager(function(t.value))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


VOCABULARY: dict[str, Any] = {
    "kernel": lambda f: f,
    "gemm": _gemm,
    "pairs": _pairs,
    "join": _join,
    "rope": _rope,
    "column_index": lambda t: Eager(torch.ones_like(t.value).cumsum(1) - 1),
    "in_columns": _in_columns,
    "column_range": lambda t, first, width: Eager(t.value[:, _between(t, first, width)]),
    "per_row": lambda v: Eager(v.value.reshape(-1, 1)),
    "per_column": lambda v: Eager(v.value.reshape(1, -1)),
    "per_head": _per_head,
    "head_abs_max": _head_abs_max,
    "head_sums": _head_sums,
    "row_select": _row_select,
    "row_sums": _of(lambda t: t.sum(1)),
    "row_max": _of(lambda t: t.max(1).values),
    "row_abs_max": _of(lambda t: t.norm(math.inf, 1)),
    "row_logsumexp": _of(lambda t: t.max(1).values + (t - t.max(1, keepdim=True).values).exp().sum(1).log()),
    "column_sums": _of(lambda t: t.sum(0)),
    "column_max": _of(lambda t: t.max(0).values),
    "column_abs_max": _of(lambda t: t.norm(math.inf, 0)),
    "where": calculate(lambda c, a, b: c * a + (1 - c) * b),
    "maximum": calculate(torch.fmax),
    "minimum": calculate(torch.fmin),
    "abs": calculate(lambda x: x * x.sign()),
    "exp": calculate(torch.exp),
    "log": calculate(torch.log),
    "sqrt": calculate(lambda x: x**0.5),
    "rsqrt": calculate(lambda x: x**-0.5),
    "tanh": calculate(torch.tanh),
    "sin": calculate(torch.sin),
    "cos": calculate(torch.cos),
    "sigmoid": calculate(lambda x: 1 / (1 + torch.exp(-x))),
    "silu": calculate(lambda x: x / (1 + torch.exp(-x))),
    "gelu": calculate(_gelu),
    **{p.name: calculate(p.truth) for p in MERGED},
}


def truth(source: str, signature: Signature, inputs: Tensors, sizes: Mapping[str, int]) -> Tensors:
    """Return the outputs of the kernel ``k`` in ``source``. ``sizes`` contains the static dims."""
    values: dict[str, Any] = {name: Eager(t.double()) for name, t in inputs.items()}
    values |= {**signature.constants} | {d: sizes[d] for d in signature.static}
    imports, code = source.split("\n", 1)  # the import is skipped, because VOCABULARY has its names
    assert imports.startswith("from primitives import ")
    namespace = dict(VOCABULARY)
    exec(compile(code, "<truth>", "exec"), namespace)
    return {name: t.value for name, t in namespace["k"](**values).items()}
