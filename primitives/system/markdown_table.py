"""Write Markdown tables. All tables that the project prints or writes into a page come from here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NONE = "–"  # a cell without a value
_BAR = re.compile(r"(?<!\\)\|")  # a bar that would end the cell


def markdown_table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table with one line for the headings and one per row. Values are Markdown, escaped so that they
    cannot end a cell or line; None becomes a dash."""
    lines = (headings, ["---"] * len(headings), *rows)
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: object) -> str:
    text = NONE if value is None else str(value)
    return _BAR.sub(r"\|", " ".join(text.split()))
