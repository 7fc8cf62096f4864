"""Charts of a comparison as SVG and PNG: speedups with their intervals, and times over the roofline.

Matplotlib draws the charts; it is imported when the first chart is drawn. The same table rows always give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from coda_agent.agent.reporting.charts import ANONYMOUS, image, shortened, styled
from coda_agent.agent.terminal.safe_text import visible
from coda_agent.comparison.competitors import (
    COLUMNS,
    COMPILE,
    FLASHINFER,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    TORCH,
    UPSTREAM,
)
from coda_agent.comparison.drawing.cells import Cell, TableRow
from coda_agent.comparison.drawing.sheets import ABSENT, mark, marks
from coda_agent.comparison.drawing.summary import SHARED, RowRatio, against, ordered
from coda_agent.verifier.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIVALS = (COMPILE, LIGER, FLASHINFER, HUMAN, UPSTREAM)  # in the order of the columns
# Okabe and Ito's colours, which colour-blind readers can tell apart. SHAPES has one marker per colour.
COLOURS = {
    COMPILE: "#E69F00",
    HUMAN: "#0072B2",
    LIGER: "#009E73",
    TORCH: "#999999",
    FLASHINFER: "#56B4E9",
    UPSTREAM: "#CC79A7",
    LLM: "#D55E00",
    MATMUL: "#000000",
}
SHAPES = dict(zip((TORCH, COMPILE, LIGER, FLASHINFER, HUMAN, UPSTREAM, LLM, MATMUL), "s^v+DXo|", strict=True))
ABOVE = {FLASHINFER: 3.5, LLM: 4}  # z-order: the cross and the ring stay visible on top of a dot
TITLES = {
    "speedup": "Speedup of the LLM's kernels over other columns, with 95% intervals",
    "roofline": "Time over the roofline, by column",
}
FILES = tuple(f"{name}.{kind}" for name in TITLES for kind in ANONYMOUS)
TICKS = (
    0.25, 0.33, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100,
)  # fmt: skip
FEWEST_INCHES = 0.4  # least distance between two labels of an axis
WIDE, HEAD, FOOT, LEFT, RIGHT = 10.0, 1.2, 0.65, 2.75, 0.25  # inches
SMALL, STEP, MOST = 7, 0.14, 165  # small print: points, inches between lines, most characters per line
BAR = 0.105  # height in inches of a bar and of the ratio beside it
LABEL = 0.5  # inches for a bar's ratio and marks
GAP = 0.55  # space between operators, relative to a row's height


def draw(lines: Sequence[TableRow], measured: str = "") -> dict[str, bytes]:
    """Draw the charts that have data, and return their files by name. There are two charts, speedup and
    roofline, each as .svg and .png. ``measured`` (kernels, machine, date) goes below the titles."""
    figures = _figures(lines, measured)
    with styled():
        return {f"{name}.{kind}": image(figures[name], kind) for name in figures for kind in ANONYMOUS}


def _figures(lines: Sequence[TableRow], measured: str) -> dict[str, Figure]:
    with styled():
        makers = {"speedup": _speedup, "roofline": _roofline}
        found = {name: maker(ordered(lines), measured) for name, maker in makers.items()}
    return {name: figure for name, figure in found.items() if figure}


# ── Speedups ──────────────────────────────────────────────────────────────────────────────────────────────


def _speedup(lines: Sequence[TableRow], measured: str) -> Figure | None:
    """Draw one bar per row and rival. A bar starts at 1, and goes right if the LLM's kernel is faster, or
    left if the rival is faster. The axis is logarithmic, so twice as fast and half as fast are equally far
    from 1."""
    found = {name: _rows(lines, name) for name in RIVALS}
    rivals = [name for name in RIVALS if found[name]]
    lines = [line for line in lines if any((line.operator, line.case) in found[name] for name in rivals)]
    if not lines:
        return None
    print_under = _footnotes(lines, rivals)
    figure, axes, places = _canvas(lines, "speedup", BAR * len(rivals) + 0.06, measured, print_under)
    ratios = [row.ratio for name in rivals for row in found[name].values()]
    low, high = min(*(r.low for r in ratios), 0.97) * 0.98, max(*(r.high for r in ratios), 1.05)
    _scale(axes, low, high * (high / low) ** (LABEL / (WIDE - LEFT - RIGHT - LABEL)))
    thick = 0.84 / len(rivals)
    for index, name in enumerate(rivals):
        offset = (index - (len(rivals) - 1) / 2) * thick
        for line, place in zip(lines, places, strict=True):
            row = found[name].get((line.operator, line.case))
            if row:
                _bar(axes, row, place + offset, thick, COLOURS[name])
            else:
                _words(axes, ABSENT, 1, place + offset)
    axes.axvline(1, color="#222222", linewidth=1.1, zorder=3)
    axes.set_xlabel(
        f"time over {LLM}'s: right of 1 {LLM}'s kernel is faster, left of it the other (log scale)"
    )
    _legend(figure, axes, [_patch(COLOURS[name], f"over {name}") for name in rivals])
    return figure


def _footnotes(lines: Sequence[TableRow], rivals: Sequence[str]) -> list[str]:
    """Footnotes for the chart. Some explain the marks. Others name the operators for which a column of
    people's kernels has a kernel that we composed, or leaves a part to PyTorch."""
    lacking = any(not (cell and cell.against) for line in lines for cell in map(line.cell, rivals))
    apart = [
        f"{name}: for {_listed(found)}, {SHARED[name].drawn}."
        for name in rivals
        if name in SHARED and (found := _operators(lines, name, SHARED[name].which))
    ]
    dash = f"{ABSENT}: no figure; the table has the reason."
    return [*marks(lines, rivals), *([dash] if lacking else []), *apart]


def _operators(lines: Sequence[TableRow], column: str, which: Callable[[str], bool]) -> list[str]:
    """The operators that satisfy ``which`` and have a figure in the column."""
    shown = (line.operator for line in lines if line.cell(column) and which(line.operator))
    return list(dict.fromkeys(shown))


def _listed(operators: Iterable[str]) -> str:
    return ", ".join(name.removeprefix("gemm_") for name in operators)


def _rows(lines: Sequence[TableRow], column: str) -> dict[tuple[str, str], RowRatio]:
    return {(tally.name, row.case): row for tally in against(lines, column).operators for row in tally.rows}


def _bar(axes: Axes, row: RowRatio, place: float, thick: float, colour: str) -> None:
    ratio = row.ratio
    axes.barh(place, ratio.estimate - 1, thick * 0.92, left=1, color=colour, linewidth=0, zorder=2)
    axes.errorbar(
        ratio.estimate,
        place,
        xerr=[[ratio.estimate - ratio.low], [ratio.high - ratio.estimate]],
        color="#222222",
        linewidth=0.9,
        capsize=1.8,
        capthick=0.9,
        zorder=4,
    )
    _words(axes, f"{ratio.estimate:.2f}{mark(row)}", max(ratio.high, 1), place)


def _words(axes: Axes, words: str, x: float, y: float) -> None:
    axes.annotate(
        words,
        (x, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=7,
        color="#333333",
        zorder=5,
    )


# ── Times over the roofline ───────────────────────────────────────────────────────────────────────────────


def _roofline(lines: Sequence[TableRow], measured: str) -> Figure | None:
    """Draw one dot per row and column: the time over the least time that the hardware allows. The axis is
    logarithmic."""
    columns = [column.name for column in COLUMNS if any(line.cell(column.name) for line in lines)]
    if not lines or not columns:
        return None
    apart = [name for name in columns if any(_indirect(line.cell(name)) for line in lines)]
    words = (
        f"{', '.join(apart)}: never in the same session as {LLM}, so drawn at {LLM}'s time multiplied by the "
        "ratio."
    )
    figure, axes, places = _canvas(lines, "roofline", 0.27, measured, [words] if apart else [])
    dots = {
        name: [
            (_time(line, cell) / line.roofline, place)
            for line, place in zip(lines, places, strict=True)
            if (cell := line.cell(name))
        ]
        for name in columns
    }
    reached = [ratio for found in dots.values() for ratio, _ in found]
    _scale(axes, min(*reached, 1.0) * 0.97, max(*reached, 1.1) * 1.05)
    for place in places:
        axes.axhline(place, color="#e4e4e4", linewidth=0.7, zorder=0)
    for name, found in dots.items():
        axes.plot(*zip(*found, strict=True), zorder=ABOVE.get(name, 3), **_dot(name))
    axes.axvline(1, color="#222222", linewidth=1.1, zorder=2)
    axes.set_xlabel("time over the roofline: 1 is the least that the hardware allows (log scale)")
    _legend(figure, axes, [_marker(name) for name in columns])
    return figure


def _time(line: TableRow, cell: Cell) -> float:
    """The cell's time in milliseconds. If the cell's ratio is indirect, the result is the LLM's time
    multiplied by the ratio, because the clock rate may differ between sessions."""
    own, ratio = line.cell(LLM), _indirect(cell)
    return own.milliseconds * ratio.estimate if own and ratio else cell.milliseconds


def _indirect(cell: Cell | None) -> Interval | None:
    """The cell's ratio if it is indirect (through the reference arm); otherwise None."""
    return cell.against if cell and cell.indirect else None


def _dot(name: str) -> dict[str, Any]:
    """The style of a column's dot. The LLM has a ring, FlashInfer a cross and matmul a dash, so that these
    three columns stay visible where dots coincide."""
    thin = SHAPES[name] in "o+|"
    return {
        "linestyle": "none",
        "marker": SHAPES[name],
        "markersize": 9.0 if thin else 6.0,
        "markerfacecolor": "none" if thin else COLOURS[name],
        "markeredgecolor": COLOURS[name] if thin else "#ffffff",
        "markeredgewidth": 1.9 if thin else 0.5,
    }


# ── Shared by both charts ─────────────────────────────────────────────────────────────────────────────────


def _canvas(
    lines: Sequence[TableRow], name: str, inches: float, measured: str, notes: Sequence[str] = ()
) -> tuple[Figure, Axes, list[float]]:
    """A figure, its axes, and the position of each table row. Each row is ``inches`` high; the operators'
    names are at the left. ``measured`` appears in small print below the title, ``notes`` at the bottom."""
    from matplotlib.figure import Figure

    places, names, place = [], [], 0.0
    for operator, members in groupby(lines, key=lambda line: line.operator):
        cases = [line.case for line in members]
        names.append((operator, place, place + len(cases) - 1))
        places += [place + i for i in range(len(cases))]
        place += len(cases) + GAP
    extent = place - GAP
    high = max(extent * inches, 1.0)
    over, under = _small(measured), [line for note in notes for line in _small(note)]
    foot = FOOT + STEP * len(under)
    total = high + HEAD + STEP * len(over) + foot
    figure = Figure(figsize=(WIDE, total), facecolor="white")
    axes = figure.add_axes((LEFT / WIDE, foot / total, (WIDE - LEFT - RIGHT) / WIDE, high / total))
    axes.set_ylim(extent - 0.5, -0.5)
    axes.set_yticks(places, [shortened(line.case, 16) for line in lines])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", top=True, labeltop=True, length=3)
    for operator, first, last in names:
        _operator(axes, operator, (first + last) / 2)
    for _, _, last in names[:-1]:
        axes.axhline(last + (1 + GAP) / 2, color="#bbbbbb", linewidth=0.7, xmin=-0.9, clip_on=False)
    figure.text(0.15 / WIDE, 1 - 0.32 / total, TITLES[name], fontsize=13, fontweight="bold", va="center")
    for place, line in enumerate(over):
        figure.text(0.15 / WIDE, 1 - (0.52 + STEP * place) / total, line, fontsize=SMALL, va="top")
    for place, line in enumerate(reversed(under)):
        figure.text(0.15 / WIDE, (0.08 + STEP * place) / total, line, fontsize=SMALL, va="bottom")
    return figure, axes, places


def _small(text: str) -> list[str]:
    return [shortened(line, MOST) for line in wrap(" ".join(visible(text).split()), MOST)]


def _operator(axes: Axes, name: str, place: float) -> None:
    """Write the operator's name at the left edge, in two lines if it is long."""
    words = name.removeprefix("gemm_").replace("_", " ")
    lines = wrap(words, 22, break_long_words=False, break_on_hyphens=False)
    axes.text(
        -(LEFT - 0.15) / (WIDE - LEFT - RIGHT),
        place,
        "\n".join(shortened(line, 24) for line in lines),
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=9,
        fontweight="bold",
    )


def _scale(axes: Axes, low: float, high: float) -> None:
    """Make the axis logarithmic, with as many plain numbers as fit."""
    from math import log

    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    inch = (WIDE - LEFT - RIGHT) / log(high / low)
    kept = [1.0]
    for tick in sorted(TICKS, key=lambda tick: abs(log(tick))):
        if low <= tick <= high and all(abs(log(tick / other)) * inch >= FEWEST_INCHES for other in kept):
            kept.append(tick)
    axes.xaxis.set_major_locator(FixedLocator(sorted(kept)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", color="#dddddd", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)


def _legend(figure: Figure, axes: Axes, handles: Sequence[Any]) -> None:
    """Put the legend above the axes and their numbers."""
    top = axes.get_position().y1 + (HEAD - 0.55) / figure.get_figheight()
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.1 / WIDE, top),
        ncols=len(handles),
        frameon=False,
        handletextpad=0.4,
        columnspacing=1.3,
        borderaxespad=0,
    )


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _marker(name: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, **_dot(name))
