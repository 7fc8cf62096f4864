"""The vocabulary of coda-agent: everything that a kernel file may import.

A kernel is written as straight-line tensor code; ``@kernel`` traces it into a Program, which the
interpreter, the lowering and the launcher work on. Importing this needs the standard library only.
"""

from primitives.elementwise import exp, log, maximum, minimum, rsqrt, sigmoid, silu, sqrt, tanh, where
from primitives.reductions import row_sums
from primitives.tiles import gemm, join, pairs
from primitives.trace import kernel
from primitives.vectors import per_column, per_row

__all__ = [
    "exp",
    "gemm",
    "join",
    "kernel",
    "log",
    "maximum",
    "minimum",
    "pairs",
    "per_column",
    "per_row",
    "row_sums",
    "rsqrt",
    "sigmoid",
    "silu",
    "sqrt",
    "tanh",
    "where",
]
