"""The console for all tables. It never interprets printed text as markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich
from rich.segment import Segment

from coda_agent.agent.terminal.safe_text import visible

STYLE = {"accepted": "bold green", "checked": "bold cyan", "rejected": "bold red"}  # by a verdict's status


class Console(rich.Console):
    """A rich console without markup. It escapes control characters in text as ``\\u....``, so only rich
    itself emits colours and cursor movements."""

    def __init__(self, **options: Any):
        # highlighting would give the parts of a run's name different colours
        super().__init__(**{"markup": False, "emoji": False, "highlight": False} | options)

    def render(self, renderable: rich.RenderableType, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
