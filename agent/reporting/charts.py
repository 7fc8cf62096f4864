"""Draw charts with matplotlib, for pages that embed them as SVG. The extra ``draw`` installs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from coda_agent.agent import extras
from coda_agent.agent.terminal.safe_text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LONG = 600.0  # seconds; a longer wait is drawn this long, so that all other bars stay visible
LEAST = 0.003  # width of the narrowest bar, as a fraction of the timeline
# The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = {
    "prompt": "#000000",
    "answer": "#0072B2",
    "draft": "#56B4E9",
    "report": "#009E73",
    "piece": "#F0E442",
    "measurement": "#E69F00",
    "void": "#D55E00",
    "other": "#999999",
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same letters
    "font.size": 9,
    "svg.hashsalt": "coda-agent",
    "svg.fonttype": "path",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}
ANONYMOUS = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), "png": {"Software": None}}
WIDE, LEFT, RIGHT, ROW, HEAD = 10.0, 2.1, 1.1, 0.27, 0.35  # inches
_ROOT = re.compile(r"<svg\b.*</svg>", re.DOTALL)  # the image without the XML header and its DTD
_NAME = re.compile(r'(\bid="|href="#|url\(#)')


@dataclass(frozen=True)
class Mark:
    """An event in the timeline. ``row``: the label of its row. ``kind``: a key of COLOURS. ``seconds``: the
    time since the previous event."""

    row: str
    kind: str
    seconds: float


def unavailable() -> str:
    """A message that says how to install matplotlib; "" if matplotlib is installed."""
    if find_spec("matplotlib"):
        return ""
    return f"Charts need matplotlib: {extras.remedy(ModuleNotFoundError(name='matplotlib'))}"


def timeline(title: str, marks: Sequence[Mark]) -> Markup:
    """Draw one bar per event, from the previous event's time to the event's own time."""
    return _chart("timeline", title, lambda: _timeline(marks))


def bars(name: str, title: str, milliseconds: Mapping[str, float], roofline: float) -> Markup:
    """Draw one horizontal bar per arm, from zero, and a line at the roofline. ``name`` must be unique on the
    page."""
    return _chart(name, title, lambda: _bars(milliseconds, roofline))


def styled(**changes: str) -> AbstractContextManager[None]:
    """Apply the style of all charts during the block. ``changes``: other settings of matplotlib, with "_" in
    place of "."."""
    from matplotlib import rc_context

    return rc_context(STYLE | {key.replace("_", "."): value for key, value in changes.items()})


def image(figure: Figure, kind: str = "svg") -> bytes:
    """A figure as SVG or PNG. Equal figures give equal bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, dpi=160, metadata=ANONYMOUS[kind])
    return buffer.getvalue()


def element(name: str, title: str, svg: str) -> Markup:
    """An SVG image as an HTML element. ``name`` becomes the prefix of all ids in the image, so that the ids
    are unique on the page."""
    root = _ROOT.search(svg)
    assert root is not None
    label = f'<svg role="img" aria-label="{escape(title)}" '
    return Markup(_NAME.sub(rf"\g<1>{name}-", root[0]).replace("<svg ", label, 1))


def shortened(text: str, most: int) -> str:
    """Text for a chart: one line of at most ``most`` characters."""
    text = " ".join(visible(text).split())
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return cut.replace("$", r"\$")  # matplotlib sets text between two dollar signs as mathematics


def _chart(name: str, title: str, make: Callable[[], Figure]) -> Markup:
    with styled(svg_fonttype="none"):
        return element(name, title, image(make()).decode())


def _timeline(marks: Sequence[Mark]) -> Figure:
    from matplotlib.patches import Patch

    rows = list(dict.fromkeys(mark.row for mark in marks))
    lengths = [min(mark.seconds, LONG) for mark in marks]
    whole = sum(lengths) or 1.0
    figure, axes = _axes(rows)
    for mark, length, end in zip(marks, lengths, accumulate(lengths), strict=True):
        wide, place, cut = max(length, whole * LEAST), rows.index(mark.row), mark.seconds > LONG
        shade = 0.35 if cut else 1.0
        axes.barh(place, wide, 0.65, left=max(end - wide, 0), color=COLOURS[mark.kind], alpha=shade)
        if cut:
            axes.text(end - wide / 2, place, f"… {duration(mark.seconds)} …", ha="center", va="center")
    for place, row in enumerate(rows):
        seconds = sum(mark.seconds for mark in marks if mark.row == row)
        axes.text(1.01, place, duration(seconds), transform=axes.get_yaxis_transform(), va="center")
    axes.set_xlim(0, whole)
    kinds = [kind for kind in COLOURS if any(mark.kind == kind for mark in marks)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="upper left", ncols=len(kinds), frameon=False, borderaxespad=0)
    return figure


def _bars(milliseconds: Mapping[str, float], roofline: float) -> Figure:
    figure, axes = _axes([shortened(arm, 30) for arm in milliseconds])
    colours = [COLOURS["answer" if arm == "candidate" else "other"] for arm in milliseconds]
    axes.barh(range(len(milliseconds)), list(milliseconds.values()), 0.65, color=colours)
    for place, value in enumerate(milliseconds.values()):
        words, after = f"{number(value)} ms", (4, 0)
        axes.annotate(words, (value, place), after, textcoords="offset points", va="center")
    axes.axvline(roofline, color=COLOURS["void"], linestyle="--")
    words = f"roofline: {number(roofline)} ms"
    axes.annotate(words, (roofline, 1.02), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    axes.set_xlim(0, max([*milliseconds.values(), roofline]) or 1.0)
    return figure


def _axes(rows: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with one labelled row per bar, and space for text above and to the right."""
    from matplotlib.figure import Figure

    high = ROW * max(len(rows), 1)
    total = high + HEAD
    figure = Figure(figsize=(WIDE, total), facecolor="white")
    axes = figure.add_axes((LEFT / WIDE, 0.02, (WIDE - LEFT - RIGHT) / WIDE, high / total - 0.02))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_visible(False)
    return figure, axes


def number(value: float) -> str:
    """Format a number with four digits, because no measurement here is more precise."""
    return f"{value:#.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Format a duration, such as ``0.02 s``, ``12.3 s``, ``3 min 20 s`` or ``6 h 52 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
