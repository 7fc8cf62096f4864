"""Suggestions for a rejected kernel: what to write instead, or what to change outside the kernel.

``tests/primitives/lang/test_remedies.py`` has a rejected program for each suggestion, and runs each
suggestion. This module needs only the standard library, because the jail imports it.
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
    "is not in the vocabulary: gemm multiplies matrices, where(condition, a, b) chooses; of two comparisons "
    "a * b is their and, maximum(a, b) their or, and 1 - a is a's not"
)
NO_NUMBER = (
    "a traced value is not one Python number: compute with the value itself; sizes are t.rows and t.columns"
)
FINITE = "a finite number, such as -3.4e38 for masked values"


def these(vocabulary: Collection[str]) -> str:
    """The whole vocabulary, with a note that nothing else exists."""
    return f"{', '.join(sorted(vocabulary))}; compose everything else from these"


def unknown(name: str, vocabulary: Collection[str]) -> str:
    """A message to the author about an unknown name."""
    return "import it from primitives" if name in vocabulary else f"there are {these(vocabulary)}"


def no_attribute(name: str, vocabulary: Collection[str]) -> str:
    """A message to the author about an unknown attribute, ``t.name``."""
    instead = _METHODS.get(name, f"{name}(t)" if name in vocabulary else None)
    return (
        f"there is no .{name} here; values have {', '.join(ATTRIBUTES)}, everything else is a function of "
        f"primitives{f': write {instead}' if instead else ''}"
    )


class Use(NamedTuple):
    """A use for which a tile must leave its step. ``said``: the use, for a message. ``homeless``: the
    suggestion if the tile belongs to no step. ``pending``: the suggestion if the tile needs a vector that is
    final only after its step."""

    said: str
    homeless: str
    pending: str


_ELSEWHERE = (
    "return the vector, and compute this in another kernel that takes it as an input and makes the tile "
    "again, as exp(gemm(x, w.mT) - per_row(lse)); in one kernel the same gemm written twice is one value"
)
_RIDING = "to ride on a gemm t of its shape, add 0 * t; without one it is a PyTorch op's or another kernel's"

OPERAND = Use(
    "this operand of gemm",
    "an operand is an input, an earlier gemm's tile, or a transpose of these: compute this in a PyTorch op "
    "before the kernel, and let the spec take its result; a row scale alone can come after, as "
    "gemm(x, w) * per_row(scale)",
    "a row scale commutes with the next matmul, so write gemm(t, w) * per_row(scale) instead of "
    f"gemm(t * per_row(scale), w). For what does not commute, {_ELSEWHERE}",
)


def output(name: str) -> Use:
    """The use of a tile as an output of the kernel."""
    later = "a later gemm's tile can meet the vector, as gemm(t, w) * per_row(scale). Otherwise "
    return Use(f"output {name!r}", _RIDING, f"{later}{_ELSEWHERE}")


def reduced(op: str) -> Use:
    """The use of a tile as the argument of a reduction."""
    sums = (
        "a row scale comes out of a row sum, as row_sums(t) * scale. Otherwise " if op == "row_sums" else ""
    )
    return Use(f"the argument of {op}", _RIDING, f"{sums}{_ELSEWHERE}")


RANGE = "of pairs, take the range before they part or after they join, so that it has both"
SELECT = "write row_sums(where(column_index(t) == per_row(index), t, 0)), which takes any width"
NARROW_BLOCKS = "of a tile half as wide write head_abs_max(join(t, t), 2 * W) for heads of W columns"
WIDE_BLOCKS = (
    "of one twice as wide take even, odd = pairs(t) and write head_abs_max(maximum(abs(even), abs(odd)), W) "
    "for heads of 2 * W columns"
)
NARROW_HEADS = "of a tile half as wide write head_sums(join(t, 0 * t), 2 * W) for heads of W columns"
WIDE_HEADS = (
    "of one twice as wide take even, odd = pairs(t) and write head_sums(even + odd, W) for heads of 2 * W "
    "columns"
)
ROWS = "nothing moves values from row to row: that is a PyTorch op's, before or after the kernel"
WIDTH = (
    "a thread holds two adjacent columns, so there is no quarter and no fourfold, not even in between. It "
    "takes another spec: the weight as two inputs, for a gemm each, or an input or output as two of half its "
    "width"
)
WIDE_REPEAT = (
    "meets a tile wider than its gemm, whose columns no thread counts within a head. It takes another spec: "
    "a vector with an entry a column, which per_column(v) spreads, or one for even and one for odd columns, "
    "as join(a * per_head(v), b * per_head(u))"
)
TWO_WIDTHS = "meets tiles of two widths: the second time write per_head(1 * v), which is another value"
GROUPED: Mapping[str, str] = {  # suggestions by what the epilogue of a gemm with offsets must not contain
    "columns": "a sum over rows would add rows of several experts. Return the tile, and sum it in a "
    "PyTorch op",
    "heads": "its rows have no heads. Use per_column(v) of a vector with an entry a column",
    "range": "it stores whole rows. Return the whole tile, of which the caller takes the columns",
    "rows": "its offsets divide another number of rows in another gemm. Give each number of rows an input of "
    "offsets",
    "narrow": "an expert's rows may begin at any address, which 16-bit vectors cannot. Let the spec declare "
    "the vector fp32",
}
REPEATED = (
    ". per_head of an input [M, W] repeats its W columns for each head. One value a head, [M, H], spreads "
    "over heads only where this kernel's head_sums made it; to spread an input so is a PyTorch op's"
)

SWEEP: Mapping[str, str] = {  # suggestions by the kind of value that a head statistic must not read
    "loaded": "no kernel has statistics of loaded heads. Compute them, and the values that use them, in a "
    "PyTorch op before or after the kernel",
    "statistic": "make it of the accumulator's own sums, as a variance of head_sums(t * t, W) / W and "
    "head_sums(t, W) / W",
    "column_index": "let the spec have a vector with an entry a column, which per_column(v) spreads",
    "per_head": "let the spec have a vector with an entry a column, which per_column(v) spreads, or the "
    "weight have the factor",
    "width": "let the spec have a vector as long as the gemm is wide, or the weight have the factor",
}
