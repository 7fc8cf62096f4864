"""Wrong fp8 outputs: wrong ranges, scales and maxima, which rounding to four bits seems to hide."""

from __future__ import annotations

from cheats.corpus import Rejection, rejected, wrong
from cheats.mathematics import BF16, FP8_E4M3, rounded
from cheats.twins import FP8_BLOCKS, FP8_GELU, FP8_NORM, FP8_SWIGLU

CHEATS = (
    FP8_SWIGLU.cheat(
        "half the range",
        "Clips at 240, where another e4m3 ends.",
        {"h * scale": "maximum(minimum(h * scale, 240), -240)"},
        wrong("act"),
    ),
    FP8_SWIGLU.cheat(
        "no saturation",
        "What lies beyond the range is lost, as by a cast without saturation.",
        {"h * scale": "where(abs(h * scale) > 448, 0, h * scale)"},
        wrong("act"),
    ),
    FP8_SWIGLU.cheat(
        "beyond the range around to its other end",
        "An integer's overflow.",
        {"h * scale": "where(h * scale > 448, h * scale - 896, h * scale)"},
        wrong("act"),
    ),
    FP8_SWIGLU.cheat(
        "rounded before the scale",
        "Four bits are four bits, and the scale is not a power of two.",
        {"h * scale": f"{rounded('h', FP8_E4M3)} * scale"},
        wrong("act"),
    ),
    FP8_SWIGLU.cheat(
        "small values flushed",
        "What e4m3 would store as a subnormal is zero.",
        {"h * scale": "where(abs(h * scale) < 0.015625, 0, h * scale)"},
        wrong("act"),
    ),
    FP8_SWIGLU.cheat(
        "the maximum of what was stored",
        "amax of the scaled values, scaled back, which ends where they saturate.",
        {"row_abs_max(h)": "row_abs_max(minimum(abs(h * scale), 448)) / scale"},
        wrong("amax"),
    ),
    FP8_SWIGLU.cheat(
        "the maximum of positive values",
        "Activations are mostly positive.",
        {"row_abs_max(h)": "row_max(h)"},
        wrong("amax"),
    ),
    FP8_SWIGLU.cheat(
        "a scale of its own",
        "Scales each row by its largest value, which is not known before the whole row is.",
        {"h * scale": "h * per_row(448 / row_abs_max(h))"},
        rejected("trace", "pending", "output 'act'"),
    ),
    FP8_SWIGLU.cheat(
        "channel scales in bf16",
        "Eight bits for a factor of four-bit values.",
        {"per_column(sw)": rounded("per_column(sw)", BF16)},
        wrong("amax"),
    ),
    FP8_GELU.cheat(
        "no saturation of GELU",
        "Beyond the range is zero.",
        {"h * scale": "where(h * scale > 448, 0, h * scale)"},
        wrong("act"),
    ),
    FP8_GELU.cheat(
        "one tensor's scales for both",
        "Rows and columns have scales of one spread.",
        {"per_column(sw)": "per_row(sx) + 0 * per_column(sw)"},
        Rejection("interpret", ("numerics", "inexact"), "output '"),
    ),
    FP8_GELU.cheat(
        "the bias scaled as the product is",
        "One multiplication for both.",
        {
            "gemm(x, w.mT) * per_row(sx) * per_column(sw) + per_column(bias)": "(gemm(x, w.mT) + "
            "per_column(bias)) * per_row(sx) * per_column(sw)"
        },
        Rejection("interpret", ("numerics", "inexact"), "output '"),
    ),
    FP8_GELU.cheat(
        "the tail below zero flushed",
        "GELU's negative values are small.",
        {"h * scale": "maximum(h, 0) * scale"},
        wrong("act"),
    ),
    FP8_GELU.cheat(
        "the maximum without the bias",
        "amax of the product's GELU.",
        {"row_abs_max(h)": "row_abs_max(gelu(z - per_column(bias)))"},
        wrong("amax"),
    ),
    FP8_NORM.cheat(
        "the scale in the stream",
        "The residual is handed on scaled as the fp8 copy is.",
        {'"h": h': '"h": h * scale'},
        wrong("h"),
    ),
    FP8_NORM.cheat(
        "the norm of the weighted rows",
        "rstd of h * gamma, which hardly differs where gamma is near one.",
        {"row_sums(h * h)": "row_sums(g * g)"},
        wrong("rstd"),
    ),
    FP8_NORM.cheat(
        "the maximum of half a row",
        "The largest of the first half of the columns.",
        {"row_abs_max(g)": "row_abs_max(where(column_index(g) * 2 < g.columns, g, 0))"},
        wrong("amax"),
    ),
    FP8_BLOCKS.cheat(
        "blocks by their spread",
        "Three times the root of the mean square: no maximum needed, and what lies beyond saturates.",
        {"head_abs_max(h, 128)": "3 * sqrt(head_sums(h * h, 128) / 128)"},
        wrong("act"),
    ),
    FP8_BLOCKS.cheat(
        "positive values alone",
        "GELU's negative ones are small, and all of a block only where the block is.",
        {"head_abs_max(h, 128)": "head_abs_max(maximum(h, 0), 128)"},
        Rejection("interpret", ("numerics", "inexact"), "output '"),
    ),
    FP8_BLOCKS.cheat(
        "a scale of before the activation",
        "The maximum of z instead of GELU's, near it where z is large.",
        {
            "h = gelu(gemm(x, w.mT) * per_row(sx) * per_column(sw))": "z = gemm(x, w.mT) * per_row(sx) * "
            "per_column(sw)\n    h = gelu(z)",
            "head_abs_max(h, 128)": "head_abs_max(z, 128)",
        },
        wrong("act"),
    ),
    FP8_BLOCKS.cheat(
        "the scale's inverse",
        "What to multiply by, where the spec says what to divide by.",
        {"size / 448": "448 / size"},
        wrong("scale"),
    ),
    FP8_BLOCKS.cheat(
        "a larger least",
        "Blocks of small values share a scale.",
        {"128), least)": "128), 0.01)"},
        wrong("act"),
    ),
)
