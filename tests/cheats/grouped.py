"""Rows with other experts than their own, tokens dropped, a router's weights taken lightly."""

from __future__ import annotations

from cheats.corpus import rejected, wrong
from cheats.twins import GROUPED_DOWN, GROUPED_SWIGLU

EXPERTS = (
    GROUPED_SWIGLU.cheat(
        "one row further",
        "Each expert begins with the second of its rows.",
        {"w.mT, offsets": "w.mT, offsets + 1"},
        rejected("trace", "dtype", "offsets are an input of int32"),
    ),
    GROUPED_SWIGLU.cheat(
        "no offsets",
        "One matrix would do for all rows.",
        {"w.mT, offsets": "w.mT"},
        rejected("trace", "arguments", "takes the offsets"),
    ),
    GROUPED_SWIGLU.cheat(
        "the matrix as it lies",
        "Rows meet columns of the wrong length.",
        {"w.mT, offsets": "w, offsets"},
        rejected("trace", "shapes", "with offsets it takes"),
    ),
    GROUPED_SWIGLU.cheat(
        "each expert's own product",
        "A matrix for each expert in place of rows.",
        {"gemm(x, w.mT, offsets)": "gemm(x.mT, x, offsets)"},
        rejected("trace", "arguments", "pairs takes one tile"),
    ),
    GROUPED_SWIGLU.cheat(
        "counted over all experts",
        "Scales by a sum over rows, which are several experts'.",
        {"silu(gate) * up": "silu(gate) * up + 0 * per_column(column_sums(up))"},
        rejected("trace", "pending", "output 'act'"),
    ),
    GROUPED_SWIGLU.cheat(
        "gate and up of experts swapped",
        "Same shape, same spread.",
        {"silu(gate) * up": "silu(up) * gate"},
        wrong("act"),
    ),
)
ROUTING = (
    GROUPED_DOWN.cheat(
        "no weights", "The caller could weigh the rows.", {" * per_row(routed)": ""}, wrong("y")
    ),
    GROUPED_DOWN.cheat(
        "weighed twice", "Once too often.", {"per_row(routed)": "per_row(routed * routed)"}, wrong("y")
    ),
    GROUPED_DOWN.cheat(
        "unlikely experts dropped",
        "A token's small weights hardly count.",
        {"per_row(routed)": "per_row(where(routed < 0.03, 0, routed))"},
        wrong("y"),
    ),
    GROUPED_DOWN.cheat(
        "weights of one at most",
        "A softmax gives no more, but the spec's domain does.",
        {"per_row(routed)": "per_row(minimum(routed, 1))"},
        wrong("y"),
    ),
)

CHEATS = (*EXPERTS, *ROUTING)
