"""Cheats against the contract: outputs, types, constants and parameters that differ from the spec's."""

from __future__ import annotations

from cheats.corpus import BY_SIZE, Cheat, Rejection, rejected, wrong
from cheats.twins import ACCUMULATE, CROSS_ENTROPY, FP8, GELU, QK_NORM, RMSNORM, SWIGLU

RETURN = '{"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(mean + eps)}'


def returning(name: str, tries: str, outputs: str, code: str, says: str) -> Cheat:
    """Return a cheat whose kernel returns ``outputs`` instead of the spec's outputs."""
    return RMSNORM.cheat(name, tries, {RETURN: outputs}, rejected("trace", code, says))


def refused(code: str, says: str) -> Rejection:
    return rejected("trace", code, says)


OUTPUTS = (
    returning(
        "an output missing",
        "What is not returned is not checked.",
        '{"h": h, "hg": h * per_column(gamma)}',
        "outputs",
        "missing rstd",
    ),
    returning(
        "an output more",
        "Brings its own verdict.",
        RETURN.replace("}", ', "speedup": mean}'),
        "outputs",
        "extra speedup",
    ),
    returning(
        "an output renamed",
        "A name that reads as another.",
        RETURN.replace('"h"', '"\u04bb"'),
        "outputs",
        "missing h",
    ),
    returning(
        "code for a name",
        "A name that closes the text it is put in.",
        RETURN.replace('"h"', "'h\"]; import os #'"),
        "outputs",
        "missing h",
    ),
    returning(
        "no dict", "Outputs by place.", "[h, h * per_column(gamma), mean]", "outputs", "must return a dict"
    ),
    returning(
        "nothing",
        "Returns what a function does that returns nothing.",
        "None",
        "outputs",
        "must return a dict",
    ),
    returning(
        "a number for an output", "Zero everywhere.", RETURN.replace('"h": h', '"h": 0'), "outputs", "is int"
    ),
    returning(
        "an input for an output",
        "Hands on a buffer that already holds numbers.",
        RETURN.replace('"h": h', '"h": x'),
        "outputs",
        "is the input 'x' itself",
    ),
    returning(
        "one value for two outputs",
        "Writes a tile once, and names it twice.",
        RETURN.replace("h * per_column(gamma)", "h"),
        "outputs",
        "'h' and 'hg' are one value",
    ),
    returning(
        "a tile for a vector",
        "Another kind of value.",
        RETURN.replace("rsqrt(mean + eps)", "h + 1"),
        "output_shape",
        "'rstd' is tile",
    ),
    returning(
        "a spread vector",
        "A vector spread over a tile is neither.",
        RETURN.replace("rsqrt(mean + eps)", "per_row(mean)"),
        "output_shape",
        "'rstd' is per_row",
    ),
    returning(
        "a vector of columns for one of rows",
        "As many dims, the wrong one.",
        RETURN.replace("rsqrt(mean + eps)", "column_sums(h)"),
        "output_shape",
        "'rstd' is vector [N]",
    ),
    returning(
        "a scalar for a vector",
        "One value for all rows.",
        RETURN.replace("rsqrt(mean + eps)", "h.columns + eps"),
        "output_shape",
        "'rstd' is a scalar",
    ),
    SWIGLU.cheat(
        "a tile of twice the width",
        "Gate and up, both unused.",
        {"silu(gate) * up": "silu(z)"},
        refused("output_shape", "'act' is tile [M, 2*F]"),
    ),
    RMSNORM.cheat(
        "a transpose",
        "Lets the caller read it sideways.",
        {'"h": h,': '"h": h.mT,'},
        refused("output_shape", "operand"),
    ),
)
NUMBERS = (
    RMSNORM.cheat(
        "a constant beyond fp32",
        "Infinite where it is used.",
        {"mean + eps": "mean + 1e39"},
        refused("constant", "not finite in fp32"),
    ),
    RMSNORM.cheat(
        "infinity by arithmetic",
        "Two finite numbers whose product is not.",
        {"mean + eps": "mean + 1e300 * 1e300"},
        refused("constant", "not finite in fp32"),
    ),
    RMSNORM.cheat(
        "not a number",
        "Compares false with every limit.",
        {"mean + eps": "mean + float('nan')"},
        refused("constant", "nan is not finite"),
    ),
    RMSNORM.cheat(
        "an integer beyond any float",
        "What no float holds.",
        {"mean + eps": "mean + (10 ** 64) ** 64"},
        refused("constant", "not finite in fp32"),
    ),
    RMSNORM.cheat(
        "a division by zero",
        "An error where none is expected.",
        {"mean + eps": "mean + 1 / 0"},
        refused("python", "ZeroDivisionError"),
    ),
    RMSNORM.cheat(
        "a size as a number",
        "To tell the cases apart by their sizes.",
        {"mean + eps": "mean + float(h.columns)"},
        refused("argument", "not one Python number"),
    ),
    RMSNORM.cheat(
        "a branch on a size",
        "Another kernel for the sizes that are checked.",
        {"mean + eps": "mean + [eps, 0][h.columns > 1024]"},
        refused("argument", "not one Python number"),
    ),
    RMSNORM.cheat(
        "a choice by size",
        "Epsilon only where the sizes are those that are timed.",
        {"mean + eps": "mean + where(h.columns < 2048, 0, eps)"},
        BY_SIZE,
    ),
    QK_NORM.cheat(
        "a loop over a size",
        "A loop as long as a head is wide.",
        {"    rstd =": "    for _ in range(P):\n        t = t + 0\n    rstd ="},
        refused("language", "range() takes whole numbers"),
    ),
    QK_NORM.cheat(
        "a case's head",
        "The 1B case's 64 columns for every head.",
        {"head_sums(t * t, 2 * P)": "head_sums(t * t, 64)"},
        refused("width", "is not divisible by 64"),
    ),
)
PARAMETERS = (
    RMSNORM.cheat(
        "a parameter missing",
        "Does without the weight.",
        {"x, gamma, eps": "x, eps", "h * per_column(gamma)": "h * 1"},
        refused("parameters", "missing gamma"),
    ),
    RMSNORM.cheat(
        "a parameter more",
        "Asks for the reference.",
        {"x, gamma, eps": "x, gamma, eps, reference=0"},
        refused("parameters", "unknown reference"),
    ),
    RMSNORM.cheat(
        "all arguments there are",
        "Whatever the verifier may pass.",
        {"x, gamma, eps": "x, gamma, eps, **more"},
        refused("language", "name the parameters"),
    ),
    RMSNORM.cheat(
        "a constant of its own",
        "A default where the spec has a value.",
        {"x, gamma, eps": "x, gamma, eps=1", "mean + eps": "mean + 1"},
        wrong("rstd"),
    ),
)
USES = (
    GELU.cheat(
        "no gemm",
        "Arithmetic on inputs alone.",
        {"gemm(x, w.mT)": "per_row(row_sums(x))"},
        refused("homeless", "belongs to no GEMM"),
    ),
    RMSNORM.cheat(
        "a scale before its rows are whole",
        "Normalises by a sum that is not done.",
        {"h * per_column(gamma)": "h * per_row(rsqrt(mean + eps)) * per_column(gamma)"},
        refused("pending", "needs a reduction over whole rows"),
    ),
    ACCUMULATE.cheat(
        "a buffer read after it is written",
        "The old gradient in a second step.",
        {"    t = gemm(dy.mT, x)": "    t = gemm(gemm(gemm(dy.mT, x) + dw, x.mT), x)"},
        refused("updates", "is also read elsewhere"),
    ),
    ACCUMULATE.cheat(
        "an fp32 operand",
        "A matmul of fp32, for more precision than was asked.",
        {"gemm(dy.mT, x)": "gemm(gemm(dw, x.mT), x)"},
        refused("dtype", "operands are"),
    ),
    FP8.cheat(
        "fp8 outside of gemm",
        "Dequantises in the epilogue.",
        {"gemm(x, w.mT)": "gemm(x, w.mT) + per_row(row_sums(x))"},
        refused("dtype", "only gemm reads that"),
    ),
    CROSS_ENTROPY.cheat(
        "a float for an index",
        "An index that another kernel computes.",
        {"row_select(z, target)": "row_select(z, row_max(z))"},
        refused("dtype", "index is an input"),
    ),
    RMSNORM.cheat(
        "no truth in a tensor",
        "Asks which case it is in.",
        {"mean + eps": "mean + eps * (0 < mean < 1)"},
        refused("language", "compare two at a time"),
    ),
    RMSNORM.cheat(
        "matmuls without end",
        "Keeps compiler and tuner busy for hours.",
        {"gemm(y, w.mT)": "gemm(gemm(" * 8 + "gemm(y, w.mT)" + ", w), w.mT)" * 8},
        rejected("contract", "steps", "at most 16"),
    ),
)
CHEATS = (*OUTPUTS, *NUMBERS, *PARAMETERS, *USES)
