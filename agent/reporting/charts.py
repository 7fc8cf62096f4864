"""Charts as inline SVG: when a run's events happened, and how long each arm of a case took.

Standard library only. Every chart has a title and every mark its own, with the figures in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from coda_agent.agent.reporting.markup import Html, element

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


def timeline(title: str, marks: Sequence[Mark]) -> Html:
    """A bar an event, from the event before it to its own commit."""
    rows = list(dict.fromkeys(mark.row for mark in marks))
    drawn = [min(mark.seconds, LONG) for mark in marks]
    scale = (WIDTH - LEFT - RIGHT) / (sum(drawn) or 1.0)
    ends = accumulate(drawn)
    parts = [_row(row, i, sum(m.seconds for m in marks if m.row == row)) for i, row in enumerate(rows)]
    for mark, length, end in zip(marks, drawn, ends, strict=True):
        parts.append(_event(mark, LEFT + end * scale, length * scale, rows.index(mark.row) * ROW))
    return _chart(title, len(rows) * ROW, parts)


def _row(name: str, index: int, seconds: float) -> Html:
    top = index * ROW
    rule = element("line", class_="rule", x1=LEFT, x2=WIDTH - RIGHT, y1=top + ROW, y2=top + ROW)
    return Html(rule + _label(name, top) + _said(WIDTH - RIGHT + 8, top, duration(seconds), "dim"))


def _event(mark: Mark, end: float, length: float, top: float) -> Html:
    cut = mark.seconds > LONG
    wide = max(length, 3.0)  # to be seen at all
    bar = element(
        "rect",
        element("title", f"{mark.title}: {duration(mark.seconds)}"),
        class_=f"mark {mark.kind} cut" if cut else f"mark {mark.kind}",
        x=f"{end - wide:.1f}", y=top + 5, width=f"{wide:.1f}", height=ROW - 9,
    )  # fmt: skip
    if cut and wide > 90:
        bar = Html(bar + _said(end - wide + 6, top, f"… {duration(mark.seconds)} …", "dim"))
    return bar


def bars(title: str, milliseconds: Mapping[str, float], roofline: float) -> Html:
    """A horizontal bar an arm, from zero, and a line across where no kernel can be faster."""
    scale = (WIDTH - LEFT - RIGHT) / (max([*milliseconds.values(), roofline]) or 1.0)
    parts = []
    for index, (arm, value) in enumerate(milliseconds.items()):
        top, length = (index + 1) * ROW, value * scale
        bar = element(
            "rect",
            element("title", f"{arm}: {number(value)} ms"),
            class_="bar candidate" if arm == "candidate" else "bar arm",
            x=LEFT, y=top + 4, width=f"{length:.1f}", height=ROW - 8,
        )  # fmt: skip
        parts += [_label(arm, top), bar, _said(LEFT + length + 8, top, f"{number(value)} ms", "value")]
    x, height = LEFT + roofline * scale, (len(milliseconds) + 1) * ROW
    words = f"roofline: {number(roofline)} ms"
    line = element(
        "line",
        element("title", words),
        class_="roofline",
        x1=f"{x:.1f}",
        x2=f"{x:.1f}",
        y1=ROW - 4,
        y2=height,
    )
    return _chart(title, height, [*parts, line, _said(x, 0, words, "dim", "middle")])


def _chart(title: str, height: float, parts: Sequence[str]) -> Html:
    box = f"0 0 {WIDTH:g} {height + 4:g}"
    return element("svg", element("title", title), *parts, viewBox=box, role="img", aria_label=title)


def _label(name: str, top: float) -> Html:
    short = name if len(name) <= 30 else name[:29] + "…"
    return _said(LEFT - 8, top, short, "label", "end")


def _said(x: float, top: float, words: str, kind: str, anchor: str = "start") -> Html:
    return element("text", words, class_=kind, x=f"{x:.1f}", y=top + 17, text_anchor=anchor)


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
