"""The console that every table goes to: text is text, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich
from rich.segment import Segment

from coda_agent.agent.reporting.safe_text import visible


class Console(rich.Console):
    """A rich console that takes no markup and shows controls as ``\\u....``: colours and cursor movements
    come from styles and rich itself, never from what is printed."""

    def __init__(self, **options: Any):
        # Without highlighting a run's name is one word, in one colour.
        super().__init__(**{"markup": False, "emoji": False, "highlight": False} | options)

    def render(self, renderable: rich.RenderableType, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
