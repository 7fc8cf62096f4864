"""The vocabulary of coda-agent: everything that a kernel file may import.

A kernel is straight-line tensor code. ``@kernel`` traces it into a Program, which can be interpreted, lowered
and launched. Importing this module needs only the standard library.
"""

from coda_agent.primitives.lang.ops.elementwise import (
    abs,
    cos,
    exp,
    gelu,
    log,
    maximum,
    minimum,
    rope,
    rsqrt,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    tanh,
    where,
)
from coda_agent.primitives.lang.ops.reductions import (
    column_abs_max,
    column_max,
    column_sums,
    row_abs_max,
    row_max,
    row_sums,
)
from coda_agent.primitives.lang.ops.stateful import head_abs_max, head_sums, row_logsumexp, row_select
from coda_agent.primitives.lang.ops.tiles import column_index, column_range, gemm, in_columns, join, pairs
from coda_agent.primitives.lang.ops.vectors import per_column, per_head, per_row
from coda_agent.primitives.lang.trace import kernel

__all__ = [
    "abs",
    "column_abs_max",
    "column_index",
    "column_max",
    "column_range",
    "column_sums",
    "cos",
    "exp",
    "gelu",
    "gemm",
    "head_abs_max",
    "head_sums",
    "in_columns",
    "join",
    "kernel",
    "log",
    "maximum",
    "minimum",
    "pairs",
    "per_column",
    "per_head",
    "per_row",
    "rope",
    "row_abs_max",
    "row_logsumexp",
    "row_max",
    "row_select",
    "row_sums",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "tanh",
    "where",
]
