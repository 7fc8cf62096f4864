"""Charts as inline SVG: when a run's events happened, and how long each arm of a case took.

Every chart has a title and every mark its own, with the figures in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from coda_agent.agent.reporting.pages import macro

__all__ = ["Mark", "bars", "duration", "number", "timeline"]

LONG = 600.0  # seconds: a longer wait is drawn as this, else a night between two events hides all others
WIDTH, LEFT, RIGHT = 960.0, 200.0, 110.0
ROW = 26.0


@dataclass(frozen=True)
class Mark:
    """An event: its row, its colour (a class of the page's), and the seconds since the event before it."""

    row: str
    kind: str
    title: str
    seconds: float


@dataclass(frozen=True)
class Shape:
    """A text of these words, or a line or rectangle with them as its title."""

    tag: str
    words: str
    attributes: Mapping[str, object]


def timeline(title: str, marks: Sequence[Mark]) -> Markup:
    """A bar an event, from the event before it to its own commit."""
    rows = list(dict.fromkeys(mark.row for mark in marks))
    drawn = [min(mark.seconds, LONG) for mark in marks]
    scale = (WIDTH - LEFT - RIGHT) / (sum(drawn) or 1.0)
    shapes: list[Shape] = []
    for index, row in enumerate(rows):
        shapes += _row(row, index * ROW, sum(mark.seconds for mark in marks if mark.row == row))
    for mark, length, end in zip(marks, drawn, accumulate(drawn), strict=True):
        shapes += _event(mark, LEFT + end * scale, length * scale, rows.index(mark.row) * ROW)
    return _chart(title, len(rows) * ROW, shapes)


def _row(name: str, top: float, seconds: float) -> list[Shape]:
    line = {"class": "rule", "x1": LEFT, "x2": WIDTH - RIGHT, "y1": top + ROW, "y2": top + ROW}
    time = _text(WIDTH - RIGHT + 8, top, duration(seconds), "dim")
    return [Shape("line", "", line), _label(name, top), time]


def _event(mark: Mark, end: float, length: float, top: float) -> list[Shape]:
    cut = mark.seconds > LONG
    wide = max(length, 3.0)  # to be seen at all
    css = f"mark {mark.kind} cut" if cut else f"mark {mark.kind}"
    place = {"x": f"{end - wide:.1f}", "y": top + 5, "width": f"{wide:.1f}", "height": ROW - 9}
    shapes = [Shape("rect", f"{mark.title}: {duration(mark.seconds)}", {"class": css} | place)]
    if cut and wide > 90:
        shapes.append(_text(end - wide + 6, top, f"… {duration(mark.seconds)} …", "dim"))
    return shapes


def bars(title: str, milliseconds: Mapping[str, float], roofline: float) -> Markup:
    """A horizontal bar an arm, from zero, and a line across where no kernel can be faster."""
    scale = (WIDTH - LEFT - RIGHT) / (max([*milliseconds.values(), roofline]) or 1.0)
    shapes: list[Shape] = []
    for index, (arm, value) in enumerate(milliseconds.items()):
        top, length = (index + 1) * ROW, value * scale
        css = "bar candidate" if arm == "candidate" else "bar arm"
        place = {"x": LEFT, "y": top + 4, "width": f"{length:.1f}", "height": ROW - 8}
        bar = Shape("rect", f"{arm}: {number(value)} ms", {"class": css} | place)
        shapes += [_label(arm, top), bar, _text(LEFT + length + 8, top, f"{number(value)} ms", "value")]
    x, height = LEFT + roofline * scale, (len(milliseconds) + 1) * ROW
    words = f"roofline: {number(roofline)} ms"
    line = {"class": "roofline", "x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": ROW - 4, "y2": height}
    return _chart(title, height, [*shapes, Shape("line", words, line), _text(x, 0, words, "dim", "middle")])


def _chart(title: str, height: float, shapes: Sequence[Shape]) -> Markup:
    return macro("chart", title, f"{WIDTH:g}", f"{height + 4:g}", shapes)


def _label(name: str, top: float) -> Shape:
    short = name if len(name) <= 30 else name[:29] + "…"
    return _text(LEFT - 8, top, short, "label", "end")


def _text(x: float, top: float, words: str, css: str, anchor: str = "start") -> Shape:
    return Shape("text", words, {"class": css, "x": f"{x:.1f}", "y": top + 17, "text-anchor": anchor})


def number(value: float) -> str:
    """To four digits, as no measurement here has more."""
    return f"{value:#.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """``0.02 s``, ``12.3 s``, ``3 min 20 s``, ``6 h 52 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
