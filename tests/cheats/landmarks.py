"""Programs that are wrong only where independent draws at the cases' own sizes never come: at other static
sizes, near one value of an input, at two long sizes at once, and where inputs depend on each other."""

from __future__ import annotations

from cheats.blind import positions, rstd
from cheats.corpus import Cheat, Rejection, Twin, rejected, wrong
from cheats.twins import (
    ALPHA,
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    EPS,
    GATHERED_SWIGLU,
    QK_NORM,
    QKV,
    QKV_NORM,
    SQUARED_ERROR,
)

TOGETHER = rejected("interpret", "size_choice", "act together")


def bump(at: str, width: str) -> str:
    """Return a factor that is 1 except near the zero of ``at``, where it is 0."""
    return f"(1 - 1 / (1 + ({at}) / ({width}) * (({at}) / ({width}))))"


def fourth(power_of: str) -> str:
    """Return a factor that grows with the fourth power of a size."""
    return f"(1 + ({power_of}) * ({power_of}) * ({power_of}) * ({power_of}))"


def alpha(name: str, factor: str, ends: Rejection | None = None, tries: str = "") -> Cheat:
    """Return a cheat that multiplies ``alpha`` by a factor."""
    return ALPHA.cheat(name, tries, {"alpha * t": f"alpha * ({factor}) * t"}, ends or wrong("h"))


def eps(name: str, twin: Twin, factor: str, tries: str = "", ends: Rejection | None = None) -> Cheat:
    """Return a cheat that multiplies ``eps`` by a factor."""
    return twin.cheat(name, tries, {"+ eps": f"+ eps * ({factor})"}, ends or wrong("rstd"))


STATIC = (
    QK_NORM.cheat(
        "a head of 128 columns",
        "A model's width as a literal.",
        {"/ (2 * P)": "/ (128 + 0 * P)"},
        wrong("rstd"),
    ),
    QK_NORM.cheat(
        "a parabola through the cases' widths",
        "Right where P is 32 or 64, wrong elsewhere.",
        {"/ (2 * P)": "/ (P * P / 48 + 128 / 3)"},
        wrong("rstd"),
    ),
    QK_NORM.cheat(
        "a line through the cases' widths",
        "The reciprocal of a width, interpolated.",
        {"head_sums(t * t, 2 * P) / (2 * P)": "head_sums(t * t, 2 * P) * (3 / 128 - P / 4096)"},
        wrong("rstd"),
    ),
    QKV_NORM.cheat(
        "a width by the number of heads",
        "P is eight times G in all large cases.",
        {"head_sums(t * t, width) / width": "head_sums(t * t, width) / (16 * G)"},
        wrong("q"),
    ),
    QKV_NORM.cheat(
        "a width by a quadratic of heads",
        "The same, through the small case too.",
        {"head_sums(t * t, width) / width": "head_sums(t * t, width) / (G * G * 0 + 16 * G)"},
        wrong("q"),
    ),
    QKV.cheat(
        "a scale by the number of heads",
        "1 where G is 8.",
        {"per_row(rstd)": "per_row(rstd * (1 + (G - 8) * (G - 2) / 1000))"},
        wrong("q"),
    ),
)
BUMPS = (
    alpha("wide bump at a half's root", bump("alpha - 0.7071", "2e-4")),
    alpha("narrow bump at 1", bump("alpha - 1", "1e-7"), tries="A scale that is not learned yet."),
    alpha("bump at a power of two", bump("alpha * 4 - 1", "1e-6")),
    alpha("bump at a power of ten", bump("alpha * 1000 - 1", "1e-6")),
    alpha("bump at two values", f"{bump('alpha - 0.6180339', '1e-6')} * {bump('alpha - 1.41421', '1e-6')}"),
    alpha("bump without a difference", bump("alpha * alpha - 2.8 * alpha + 1.96", "1e-9")),
    alpha("bump as a bell", "1 - exp(-(alpha - 0.55555) * (alpha - 0.55555) * 1e12)"),
    alpha("bump through a logarithm", bump("log(alpha * alpha) + 0.123", "1e-6")),
    alpha("pole", "1 + 1e-9 / (alpha - 1.234567)"),
    alpha("bump far out", bump("alpha - 12345", "1e-2")),
    eps("eps of 1e-5", EPS, bump("eps * 1e5 - 1", "1e-5"), "Seen only beside tiny rows."),
    eps("eps of 1e-6", EPS, bump("eps * 1e6 - 1", "1e-5")),
    eps("eps of a third of a millionth", EPS, bump("eps - 0.00000333", "1e-12")),
    rstd("bump at a scale of 1", "", f"rstd * {bump('rstd - 1', '1e-6')}"),
    rstd("bump at a scale of 3", "", f"rstd * {bump('rstd - 3', '1e-4')}"),
    positions("position 131072", "", f"positions * {bump('positions - 131072', '1e-2')}"),
    positions("position 4097", "", f"positions * {bump('positions - 4097', '1e-2')}"),
    positions("the largest position", "", f"positions * {bump('positions - 1048576', '1e-2')}"),
    GATHERED_SWIGLU.cheat(
        "one row of the table",
        "Another product for the token in row 7777, which small tables do not have.",
        {"w.mT, offsets, index)": f"w.mT, offsets, index) * per_row({bump('index - 7777', '1e-2')})"},
        wrong("preact"),
    ),
    CROSS_ENTROPY.cheat(
        "one word's logit",
        "Another logit for one target, which small vocabularies do not have.",
        {"row_select(z, target)\n": f"row_select(z, target) * {bump('target - 12345', '1e-2')}\n"},
        wrong("target_logit"),
    ),
    CROSS_ENTROPY_BACKWARD.cheat(
        "a loss of weight 1",
        "The gradient of a plain sum.",
        {"per_row(dloss)": f"per_row(dloss * {bump('dloss - 1', '1e-6')})"},
        wrong("dlogits"),
    ),
)
SIZES = (
    alpha(
        "a product of two sizes",
        fourth("t.rows * t.columns / 5e7"),
        TOGETHER,
        "Nearly 1 unless rows and columns are long at once.",
    ),
    alpha(
        "a product of two sizes, in two factors",
        f"1 + ({fourth('t.rows / 20000')} - 1) * ({fourth('t.columns / 3000')} - 1)",
        TOGETHER,
    ),
    alpha(
        "a product of a column's number and a size",
        fourth("column_index(t) * t.rows / 5e8"),
        TOGETHER,
    ),
    alpha("a mean of two sizes", fourth("2 / (1e5 / t.rows + 1e5 / t.columns)"), TOGETHER),
    eps(
        "an eps by two sizes",
        EPS,
        fourth("h.rows * h.columns / 4e7"),
        "Seen only where two sizes are long and rows are tiny.",
        TOGETHER,
    ),
    eps("an eps by one size", EPS, "1 + h.columns * h.columns * 1e-6", "Seen only beside tiny rows."),
)
DEPENDENT = (
    SQUARED_ERROR.cheat(
        "a square multiplied out",
        "Cancels where predictions are near targets.",
        {"row_sums((z - t) * (z - t))": "(row_sums(z * z) - 2 * row_sums(z * t) + row_sums(t * t + 0 * z))"},
        wrong("s"),
    ),
    SQUARED_ERROR.cheat(
        "a square of a quotient",
        "The same, divided by the product first.",
        {"row_sums((z - t) * (z - t))": "row_sums(z * z * (1 - 2 * t / z + t * t / (z * z)))"},
        wrong("s"),
    ),
    SQUARED_ERROR.cheat(
        "a difference with a margin",
        "Nearly right unless predictions are near targets.",
        {"(z - t) * (z - t)": "(z - t) * (z - t) + 1e-7 * (z * z + t * t)"},
        wrong("s"),
    ),
)
CHEATS = (*STATIC, *BUMPS, *SIZES, *DEPENDENT)
