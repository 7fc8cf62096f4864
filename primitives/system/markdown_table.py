"""Markdown tables: every one that this project prints or writes into a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NONE = "–"  # a cell without a value
_BAR = re.compile(r"(?<!\\)\|")  # unescaped, it would end the cell


def markdown_table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table, a line each for headings and rows. Cells are Markdown, of which none can end its cell or
    line; None is a dash."""
    lines = (headings, ["---"] * len(headings), *rows)
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: object) -> str:
    text = NONE if value is None else str(value)
    return _BAR.sub(r"\|", " ".join(text.split()))
