"""Cheats with grouped products: wrong experts for rows, tokens confused or dropped, and wrong uses of a
router's weights."""

from __future__ import annotations

from cheats.corpus import Rejection, rejected, wrong
from cheats.mathematics import FP8_E4M3, rounded
from cheats.twins import (
    GATHERED_SWIGLU,
    GROUPED_DOWN,
    GROUPED_SWIGLU,
    GROUPED_SWIGLU_BACKWARD,
    WEIGHT_GRADIENT,
)

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
        rejected("trace", "arguments", "needs row offsets"),
    ),
    GROUPED_SWIGLU.cheat(
        "the matrix as it lies",
        "Rows meet columns of the wrong length.",
        {"w.mT, offsets": "w, offsets"},
        rejected("trace", "shapes", "with offsets [E + 1], gemm takes"),
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
GATHERING = (
    GATHERED_SWIGLU.cheat(
        "index ignored",
        "Tokens in the order in which they came.",
        {"mT, offsets, index)": "mT, offsets)"},
        rejected("trace", "output_shape", "output 'preact'"),
    ),
    GATHERED_SWIGLU.cheat(
        "the next token",
        "Each row is of the token after its own.",
        {"mT, offsets, index)": "mT, offsets, index + 1)"},
        rejected("trace", "dtype", "index is an input of int32"),
    ),
    GATHERED_SWIGLU.cheat(
        "experts' first tokens",
        "Tokens are named by where experts begin.",
        {"mT, offsets, index)": "mT, offsets, offsets)"},
        rejected("trace", "output_shape", "output 'preact'"),
    ),
    GATHERED_SWIGLU.cheat(
        "rows by index, tokens by offsets",
        "Both are vectors of row numbers.",
        {"mT, offsets, index)": "mT, index, offsets)"},
        rejected("trace", "shapes", "with offsets [E + 1], gemm takes"),
    ),
    GATHERED_SWIGLU.cheat(
        "the first token dropped",
        "One token of many.",
        {"mT, offsets, index)": "mT, offsets, index) * per_row(where(index < 1, 0, 1))"},
        wrong("preact"),
    ),
    GATHERED_SWIGLU.cheat(
        "late tokens dropped",
        "Few batches are so large.",
        {"mT, offsets, index)": "mT, offsets, index) * per_row(where(index > 5000, 0, 1))"},
        wrong("preact"),
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
BACKWARD = (
    GROUPED_SWIGLU_BACKWARD.cheat(
        "up for gate",
        "Both are halves of z.",
        {"gate, up = pairs(z)": "up, gate = pairs(z)"},
        Rejection("interpret", ("numerics", "inexact"), "output '"),
    ),
    GROUPED_SWIGLU_BACKWARD.cheat(
        "gradients of gate and up swapped",
        "Same shape, same spread.",
        {
            "join(weighed * up * s * (1 + gate * (1 - s)), weighed * gate * s)": "join("
            "weighed * gate * s, weighed * up * s * (1 + gate * (1 - s)))"
        },
        wrong("dz"),
    ),
    GROUPED_SWIGLU_BACKWARD.cheat(
        "a straight gate",
        "SiLU's slope is its sigmoid, where the gate is near 0.",
        {" * (1 + gate * (1 - s))": ""},
        wrong("dz"),
    ),
    GROUPED_SWIGLU_BACKWARD.cheat(
        "unlikely tokens dropped",
        "Small weights give small gradients.",
        {"weighed = d * per_row(routed)": "weighed = d * per_row(where(routed < 0.03, 0, routed))"},
        wrong("dz"),
    ),
    GROUPED_SWIGLU_BACKWARD.cheat(
        "the router's gradient weighed",
        "The weight is in the activation anyway.",
        {"row_sums(d * plain)": "row_sums(weighed * plain)"},
        wrong("drouted"),
    ),
)
# Products whose results nobody needs have epilogues, and an epilogue can change an operand of the next
# product.
HONEST = 'return {"dw": gemm(dz.mT, x, offsets)}'
OPERAND = """t = gemm(dz, gemm(dz.mT, dz))
    size = row_abs_max(dz + 0 * t)
    u = gemm(dz, gemm(dz.mT, t))
    d = REPLACED + 0 * u
    return {"dw": gemm(d.mT, x, offsets)}"""
GRADIENT = (
    WEIGHT_GRADIENT.cheat(
        "a neighbour's gradient",
        "Each expert's rows go to the next.",
        {"mT, x, offsets": "mT, x, offsets + 1"},
        rejected("trace", "dtype", "offsets are an input of int32"),
    ),
    WEIGHT_GRADIENT.cheat(
        "one gradient for all experts",
        "A sum over all rows.",
        {"mT, x, offsets": "mT, x"},
        rejected("trace", "output_shape", "output 'dw' is tile [N, K]"),
    ),
    WEIGHT_GRADIENT.cheat(
        "quiet tokens dropped",
        "Rows without a large gradient hardly count in a sum.",
        {HONEST: OPERAND.replace("REPLACED", "where(per_row(size) < 3, 0, dz)")},
        wrong("dw"),
    ),
    WEIGHT_GRADIENT.cheat(
        "fp8 gradients",
        "An operand keeps four bits of eight.",
        {HONEST: OPERAND.replace("REPLACED", rounded("dz", FP8_E4M3))},
        wrong("dw"),
    ),
)

CHEATS = (*EXPERTS, *GATHERING, *ROUTING, *BACKWARD, *GRADIENT)
