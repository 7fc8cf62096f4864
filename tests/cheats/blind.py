"""Programs that are right on typical inputs alone. Their clamps and conditions act only beyond the values
that ``init`` draws."""

from __future__ import annotations

from cheats.corpus import BY_SIZE, Cheat, Rejection, rejected, wrong
from cheats.twins import ALPHA, CLAMPED, MLP, RMSNORM, ROPE, SCALED

IDLE = rejected("interpret", "idle_choice", "changes nothing within the spec's domain")
JUMPS = rejected("interpret", "size_choice", "jump")


def positions(name: str, tries: str, value: str, ends: Rejection | None = None) -> Cheat:
    """Return a cheat that rotates by ``value`` instead of the positions."""
    return ROPE.cheat(name, tries, {"rope(t, positions,": f"rope(t, {value},"}, ends or wrong("q"))


def rstd(name: str, tries: str, value: str, ends: Rejection | None = None) -> Cheat:
    """Return a cheat that scales rows by ``value`` instead of ``rstd``."""
    return SCALED.cheat(name, tries, {"per_row(rstd)": f"per_row({value})"}, ends or wrong("y"))


def act(name: str, tries: str, factor: str, ends: Rejection) -> Cheat:
    """Return a cheat whose activation has a factor that is 1 at most sizes."""
    return MLP.cheat(name, tries, {"silu(gate) * up": f"silu(gate) * up * ({factor})"}, ends)


VALUES = (
    positions("contexts end at 8192", "Clamps what init never draws.", "minimum(positions, 8191)"),
    positions(
        "a minimum without one",
        "The same clamp, by a root of a square.",
        "(positions + 8191 - sqrt((positions - 8191) * (positions - 8191))) / 2",
    ),
    positions("a smooth step", "The same, as a sigmoid.", "positions * sigmoid(1000 * (8191.5 - positions))"),
    positions(
        "one position", "Another angle at one position alone.", "where(positions == 5000, 0, positions)"
    ),
    rstd("large scales clamped", "Clamps what init never draws.", "minimum(rstd, 1.5)"),
    rstd("small scales clamped", "Clamps what init never draws.", "maximum(rstd, 0.25)"),
    rstd("scales far out clamped", "Clamps what is legal still.", "minimum(rstd, 1e12)"),
    rstd(
        "a band of scales",
        "Two comparisons, each of which holds somewhere, and seldom both.",
        "rstd * (1 + 0.1 * (rstd > 100) * (rstd < 120))",
    ),
    rstd(
        "a band that nobody meets",
        "The same, so narrow that no search finds it.",
        "rstd * (1 + 0.1 * (rstd > 1.0e9) * (rstd < 1.0001e9))",
        IDLE,
    ),
    SCALED.cheat(
        "large products dropped",
        "Zero beyond a million.",
        {"t * per_row(rstd)": "where(abs(t) > 1e6, 0, t * per_row(rstd))"},
        wrong("y"),
    ),
    SCALED.cheat(
        "large products of small scales dropped",
        "Zero where one input is large and another small.",
        {"t * per_row(rstd)": "where((t > 900) * per_row(rstd < 0.01), 0, t * per_row(rstd))"},
        wrong("y"),
    ),
    ALPHA.cheat(
        "alpha taken out",
        "Divides by what may be zero, as a learned scalar is at first.",
        {"x + alpha * t": "(t + x * (1 / alpha)) * alpha"},
        wrong("h"),
    ),
    CLAMPED.cheat(
        "a clamp left out", "Values as large are seldom.", {"minimum(gate, limit)": "gate"}, wrong("act")
    ),
    CLAMPED.cheat(
        "a clamp too high",
        "The difference is far out.",
        {"minimum(up, limit)": "minimum(up, 8)"},
        wrong("act"),
    ),
    RMSNORM.cheat(
        "a guard that never acts",
        "A sum of squares is never negative.",
        {"h.columns\n": "h.columns\n    mean = maximum(mean, 0)\n"},
        IDLE,
    ),
)
SIZES = (
    act("zero at 1B", "A ratio of sizes as a condition.", "4 * gate.columns != 11 * x.columns", BY_SIZE),
    act(
        "zero at 1B, by a tile",
        "The same, with a zero of a tile added.",
        "4 * gate.columns + 0 * gate != 11 * x.columns",
        wrong("act"),
    ),
    act(
        "a dip at 1B",
        "The same without a comparison: a quotient that is zero there, and else nearly 1.",
        "1 - 1e-12 / ((gate.columns - 5632) ** 2 + (x.columns - 2048) ** 2 + 1e-12)",
        JUMPS,
    ),
    act(
        "two sizes at once",
        "A condition of two sizes that only a GPU meets together.",
        "1 - (gate.columns + 0 * gate == 5632) * (x.columns + 0 * gate == 2048)",
        JUMPS,
    ),
    SCALED.cheat(
        "columns beyond any case",
        "A mask by column index that no case reaches.",
        {"t * per_row(rstd)": "where(column_index(t) < 2e6, t * per_row(rstd), 0)"},
        IDLE,
    ),
    SCALED.cheat(
        "the last columns of long rows",
        "A mask by column index that the largest case reaches.",
        {"t * per_row(rstd)": "where(column_index(t) < 20000, t * per_row(rstd), 0)"},
        wrong("y"),
    ),
)
CHEATS = (*VALUES, *SIZES)
