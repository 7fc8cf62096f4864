"""Suggestions for a rejected kernel: what to write instead, or what to change outside the kernel.

For each suggestion, ``tests/primitives/lang/test_remedies.py`` has a rejected program, and a corrected
program that does what the suggestion says. The test runs the corrected program. This module needs only the
standard library, because the jail (the process that traces a kernel file) imports it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

ATTRIBUTES = ("columns", "mT", "rows")  # attributes of a traced value
_METHODS = {
    "sum": "row_sums(t), column_sums(t) or head_sums(t, width)",
    "mean": "row_sums(t) / t.columns",
    **dict.fromkeys(("max", "amax"), "row_max(t) or column_max(t)"),
    "logsumexp": "row_logsumexp(t)",
    **dict.fromkeys(("shape", "size"), "t.rows and t.columns"),
    **dict.fromkeys(("T", "t", "transpose"), "t.mT"),
    **dict.fromkeys(("pow", "square"), "t ** 2"),
    **dict.fromkeys(("dtype", "to", "float", "bfloat16", "half"), "t itself: registers compute in fp32"),
}
NO_OPERATOR = (
    "is not in the vocabulary: gemm multiplies matrices, and where(condition, a, b) chooses. For comparisons "
    "a and b, write a * b for and, maximum(a, b) for or, and 1 - a for not"
)
NO_NUMBER = (
    "a traced value is not one Python number: compute with the value itself; sizes are t.rows and t.columns"
)
FINITE = "a finite number, such as -3.4e38 for masked values"


def these(vocabulary: Collection[str]) -> str:
    """Text that lists the whole vocabulary and says that there is nothing else."""
    return f"{', '.join(sorted(vocabulary))}; compose everything else from these"


def unknown(name: str, vocabulary: Collection[str]) -> str:
    """A message to the author about an unknown name."""
    return "import it from primitives" if name in vocabulary else f"there are {these(vocabulary)}"


def no_attribute(name: str, vocabulary: Collection[str]) -> str:
    """A message to the author about an unknown attribute, ``t.name``."""
    instead = _METHODS.get(name, f"{name}(t)" if name in vocabulary else None)
    return (
        f"there is no .{name} here; values have only {', '.join(ATTRIBUTES)}; everything else is a function "
        f"of primitives{f': write {instead}' if instead else ''}"
    )


class Use(NamedTuple):
    """A use of a tile outside its step, for example as an output. ``said``: the use in words, for a message.
    ``homeless``: the suggestion if the tile belongs to no step. ``pending``: the suggestion if the tile needs
    a vector that is final only after the tile's step."""

    said: str
    homeless: str
    pending: str


_ELSEWHERE = (
    "return the vector, and compute this in another kernel that takes it as an input and computes the gemm "
    "again, as exp(gemm(x, w.mT) - per_row(lse)); in one kernel the same gemm written twice is one value"
)
_RIDING = (
    "to compute it in the epilogue of a gemm t of its shape, add 0 * t; if there is no such gemm, use a "
    "PyTorch op or another kernel"
)

OPERAND = Use(
    "this operand of gemm",
    "an operand is an input, an earlier gemm's tile, or a transpose of these: compute this in a PyTorch op "
    "before the kernel, and make its result an input of the spec; a row scale can instead follow the gemm, "
    "as gemm(x, w) * per_row(scale)",
    "a row scale commutes with the next matmul, so write gemm(t, w) * per_row(scale) instead of "
    f"gemm(t * per_row(scale), w). Otherwise {_ELSEWHERE}",
)


def output(name: str) -> Use:
    """The use of a tile as an output of the kernel."""
    later = "combine the vector with a later gemm's tile, as gemm(t, w) * per_row(scale). Otherwise "
    return Use(f"output {name!r}", _RIDING, f"{later}{_ELSEWHERE}")


def reduced(op: str) -> Use:
    """The use of a tile as the argument of a reduction."""
    sums = (
        "move a row scale out of the row sum, as row_sums(t) * scale. Otherwise " if op == "row_sums" else ""
    )
    return Use(f"the argument of {op}", _RIDING, f"{sums}{_ELSEWHERE}")


RANGE = "take the range before pairs(t) or after join(a, b), so that it has both columns of each pair"
SELECT = "write row_sums(where(column_index(t) == per_row(index), t, 0)), which takes any width"
NARROW_BLOCKS = "for a tile half as wide, write head_abs_max(join(t, t), 2 * W), where heads have W columns"
WIDE_BLOCKS = (
    "for a tile twice as wide, take even, odd = pairs(t) and write "
    "head_abs_max(maximum(abs(even), abs(odd)), W), where heads have 2 * W columns"
)
NARROW_HEADS = "for a tile half as wide, write head_sums(join(t, 0 * t), 2 * W), where heads have W columns"
WIDE_HEADS = (
    "for a tile twice as wide, take even, odd = pairs(t) and write head_sums(even + odd, W), where heads "
    "have 2 * W columns"
)
ROWS = "a kernel cannot move values between rows: use a PyTorch op before or after the kernel"
WIDTH = (
    "a thread holds two adjacent columns, so no tile, not even an intermediate one, can be a quarter or "
    "four times as wide as its gemm. Change the spec: split the weight into two inputs, with one gemm each, "
    "or split an input or output into two of half its width"
)
WIDE_REPEAT = (
    "meets a tile wider than its gemm, where threads do not know a column's place in its head. Change the "
    "spec: use per_column(v) of a vector with one entry per column, or one vector for even and one for odd "
    "columns, as join(a * per_head(v), b * per_head(u))"
)
TWO_WIDTHS = "meets tiles of two widths: the second time write per_head(1 * v), which is a separate value"
GROUPED: Mapping[str, str] = {  # suggestions, by what the epilogue of a gemm with offsets must not have
    "columns": "a sum over rows would add rows of several experts. Return the tile, and sum it in a "
    "PyTorch op",
    "heads": "its rows have no heads. Use per_column(v) of a vector with one entry per column",
    "range": "it stores whole rows. Return the whole tile, and let the caller take the columns",
    "rows": "another gemm with the same offsets has a different number of rows. Declare one input of offsets "
    "for each number of rows",
    "narrow": "an expert's part of a 16-bit vector may begin at a misaligned address. In the spec, "
    "declare the vector fp32",
}
REPEATED = (
    ". per_head of an input [M, W] repeats its W columns for each head. One value per head, [M, H], can be "
    "spread only where this kernel's head_sums made it; use a PyTorch op to spread such an input"
)

SWEEP: Mapping[str, str] = {  # suggestions, by a kind of value that a head statistic must not read
    "loaded": "no kernel has statistics of loaded heads. Compute them, and the values that use them, in a "
    "PyTorch op before or after the kernel",
    "statistic": "compute it from sums of the accumulator, as a variance from head_sums(t * t, W) / W and "
    "head_sums(t, W) / W",
    "column_index": "add to the spec a vector with one entry per column, and write per_column(v)",
    "per_head": "add to the spec a vector with one entry per column, and write per_column(v), or fold the "
    "factor into the weight",
    "width": "add to the spec a vector with one entry per column of the gemm, or fold the factor into the "
    "weight",
}
