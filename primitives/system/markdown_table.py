"""Write Markdown tables. All tables that the project prints or puts into a page come from this module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

NONE = "–"  # a cell without a value
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
_BAR = re.compile(r"(?<!\\)\|")  # a bar that would end the cell


def markdown_table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with one line for the headings and one line per row. Values may contain Markdown. Bars
    in values are escaped, and line breaks become spaces. None becomes a dash."""
    lines = (headings, ["---"] * len(headings), *rows)
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def places(text: str) -> list[str]:
    """Return the names of the tables for which a page has a place. A place lies between ``<!-- table: NAME
    -->`` and ``<!-- /table -->``."""
    return [name for _, name, _ in _PLACE.findall(text)]


def filled(text: str, tables: Mapping[str, str]) -> str:
    """Return the page ``text`` with each of ``tables`` in its place. Places of other tables do not change."""
    return _PLACE.sub(lambda m: m[1] + tables[m[2]] + m[3] if m[2] in tables else m[0], text)


def _cell(value: object) -> str:
    text = NONE if value is None else str(value)
    return _BAR.sub(r"\|", " ".join(text.split()))
