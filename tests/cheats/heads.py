"""Cheats with packed heads: equal treatment of heads that differ, wrong ranges, and a model's numbers as
literals."""

from __future__ import annotations

from cheats.corpus import rejected, wrong
from cheats.twins import EPS, QKV, QKV_NORM

ROTATED = "where(in_columns(t, 0, heads + groups), turned, t)"
PRODUCT = "gemm(x, w.mT) * per_row(rstd) + per_column(bias)"
TABLE = "cos, sin = pairs(per_head(cos_sin))"

ROTATION = (
    QKV.cheat("a rotated v", "Saves the choice by columns.", {ROTATED: "turned"}, wrong("v")),
    QKV.cheat(
        "keys as they are",
        "Turns the queries alone.",
        {ROTATED: ROTATED.replace(" + groups", "")},
        wrong("k"),
    ),
    QKV.cheat(
        "one head too many",
        "Turns the first head of v too.",
        {ROTATED: ROTATED.replace("groups)", "groups + 2 * P)")},
        wrong("v"),
    ),
    QKV.cheat(
        "one head too few",
        "Leaves the last head of k as it is.",
        {ROTATED: ROTATED.replace("groups)", "groups + -2 * P)")},
        wrong("k"),
    ),
    QKV.cheat(
        "half of the last head",
        "Ends within a head.",
        {ROTATED: ROTATED.replace("groups)", "groups + -1 * P)")},
        wrong("k"),
    ),
    QKV.cheat(
        "keys turned back",
        "The other direction, which attention of one token to itself does not see.",
        {TABLE: f"{TABLE}\n    sin = where(in_columns(even, P * H, P * G), -sin, sin)"},
        wrong("k"),
    ),
)
SCALES = (
    QKV.cheat(
        "queries scaled twice",
        "The row scale once more, where rows are nearly of length 1.",
        {PRODUCT: f"{PRODUCT}\n    t = where(in_columns(t, 0, heads), t * per_row(rstd), t)"},
        wrong("q"),
    ),
    QKV.cheat(
        "the bias scaled too",
        "One multiplication for both.",
        {PRODUCT: "(gemm(x, w.mT) + per_column(bias)) * per_row(rstd)"},
        wrong("q"),
    ),
    QKV.cheat(
        "values without their bias",
        "Where nothing turns, nothing is added either.",
        {ROTATED: ROTATED.replace(", t)", ", t - per_column(bias))")},
        wrong("v"),
    ),
    QKV_NORM.cheat(
        "values normed too",
        "Every head has statistics anyway.",
        {"turned, t)": "turned, t * per_head(scale))"},
        wrong("v"),
    ),
    QKV_NORM.cheat(
        "one weight for both norms",
        "The queries' serves the keys.",
        {"per_head(gamma_k)": "per_head(gamma_q) + 0 * per_head(gamma_k)"},
        wrong("k"),
    ),
    QKV_NORM.cheat(
        "a mean over two heads",
        "Divides by twice the width.",
        {"head_sums(t * t, width) / width": "head_sums(t * t, width) / (2 * width)"},
        wrong("q"),
    ),
)
RANGES = (
    QKV.cheat(
        "keys and values swapped",
        "Both have one shape.",
        {
            '"k": k': '"k": column_range(out, heads + groups, groups)',
            '"v": column_range(out, heads + groups, groups)': '"v": k',
        },
        wrong("k"),
    ),
    QKV.cheat(
        "queries from the second head on",
        "As many columns, a head further.",
        {"column_range(out, 0, heads)": "column_range(out, 2 * P, heads)"},
        wrong("q"),
    ),
    QKV.cheat(
        "values that are the keys",
        "Stores one range less.",
        {'"v": column_range(out, heads + groups, groups)': '"v": column_range(out, heads, groups)'},
        rejected("trace", "outputs", "are one value"),
    ),
    QKV.cheat(
        "a range past the end",
        "Reads what no thread computed.",
        {
            '"v": column_range(out, heads + groups, groups)':
            '"v": column_range(out, heads + groups + 2 * P, groups)'
        },
        rejected("trace", "shapes", "do not contain them at every size"),
    ),
)  # fmt: skip
NUMBERS = (
    EPS.cheat(
        "the usual eps",
        "Right for the model of the day.",
        {"+ eps": "+ 1e-6 + 0 * eps"},
        wrong("rstd"),
    ),
    EPS.cheat(
        "eps for small rows alone",
        "Elsewhere it hardly counts.",
        {"rsqrt(mean + eps)": "rsqrt(where(mean < 1e-6, mean + eps, mean))"},
        wrong("rstd"),
    ),
    QKV_NORM.cheat("eps left out", "It hardly counts.", {"+ eps": "+ 0 * eps"}, wrong("q")),
)
CHEATS = (*ROTATION, *SCALES, *RANGES, *NUMBERS)
