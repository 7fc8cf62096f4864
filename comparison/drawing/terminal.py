"""Show a comparison in a terminal while it is measured. On a narrow terminal the columns are split into
blocks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from coda_agent.agent.reporting.charts import number
from coda_agent.agent.terminal.safe_text import visible
from coda_agent.comparison.competitors import LLM
from coda_agent.comparison.drawing.cells import NAMES, Cell, Empty, TableRow, lines
from coda_agent.comparison.drawing.sheets import ABSENT, Notes, clocks, columns_of, fastest, mark, marks
from coda_agent.comparison.drawing.summary import NOTHING, RowRatio, ordered
from coda_agent.comparison.results import Results

NAME, CASE = 15, 11  # widths in characters of an operator's name and of a case
STYLES = {"win": "green", "tie": "dim", "loss": "red", "undecided": "yellow"}
MOST_REASONS = 8
UNMEASURED = "not measured"


def table(results: Results, doing: str = "", columns: Collection[str] = NAMES) -> RenderableType:
    """The table of milliseconds and of ratios to the LLM's kernel. In each row, the fastest of the shown
    columns is bold. A ratio is green for a win of the LLM's kernel, and red for a loss. Empty cells refer to
    numbered notes below the table. ``doing`` is shown above the table, because the screen may be too small
    for the whole table."""
    found, reasons = ordered(lines(results, columns)), Notes()
    shown = _rows(found)
    parts: list[RenderableType] = [_line(doing, "cyan")] if doing else []
    if shown:
        names = columns_of([line for _, line in shown])
        # Fill all cells row by row first, so that the notes' numbers do not depend on the number of blocks.
        cells = [[_cell(name, line, reasons) for name in names] for _, line in shown]
        parts.append(_Blocks(shown, names, cells))
    else:
        parts.append(Text(NOTHING))
    told = (*marks(found, columns), *clocks(found, columns))
    parts += [Text(visible(sentence), "dim") for sentence in told]
    listed = [f"{place} {text}" for place, text in reasons]
    more = len(listed) - MOST_REASONS
    parts += [_line(text, "dim") for text in listed[:MOST_REASONS]]
    parts += [_line(f"and {more} more reasons", "dim")] if more > 0 else []
    return Group(*parts)


def _rows(found: list[TableRow]) -> list[tuple[str, TableRow]]:
    """Each row with the text at its left. If an operator's name needs several lines, the lines are
    distributed over the operator's rows."""
    rows: list[tuple[str, TableRow]] = []
    for operator, group in groupby(found, key=lambda line: line.operator):
        names, members = _name(operator), list(group)
        last = len(members) - 1
        beside = [*names[:last], "\n".join(names[last:]), *[""] * last]
        rows += zip(beside, members, strict=False)
    return rows


def _name(operator: str) -> list[str]:
    """A name on as many lines as needed, broken between words."""
    lines = [""]
    for word in re.findall(r"[^_ ]*(?:[_ ]|$)", visible(operator).removeprefix("gemm_")):
        joined = lines[-1] + word
        lines = [*lines[:-1], joined] if len(joined.rstrip()) <= NAME else [*lines, word]
    return [line.rstrip() for line in lines]


@dataclass(frozen=True)
class _Blocks:
    """The table, in blocks of as many columns as fit side by side. ``cells``: one sequence per row."""

    rows: Sequence[tuple[str, TableRow]]
    names: Sequence[str]
    cells: Sequence[Sequence[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(f"Milliseconds, and time over {LLM}'s", "italic")
        block: list[int] = []
        left = room = options.max_width - NAME - CASE - 2
        for column, name in enumerate(self.names):
            heading = max(map(len, _heading(name).split("\n")))
            width = 1 + max(heading, *(row[column].cell_len for row in self.cells))
            if block and width > left:
                yield self._block(block)
                block, left = [], room
            block.append(column)
            left -= width
        yield self._block(block)

    def _block(self, columns: Sequence[int]) -> Table:
        made = Table(box=None, padding=(0, 1, 0, 0))
        made.add_column("operator", width=NAME, no_wrap=True, overflow="ellipsis")
        made.add_column("case", width=CASE, no_wrap=True, overflow="ellipsis")
        for column in columns:
            made.add_column(_heading(self.names[column]), justify="right", no_wrap=True)
        for (operator, line), cells in zip(self.rows, self.cells, strict=True):
            shown = [cells[column] for column in columns]
            made.add_row(Text(operator, "bold"), Text(visible(line.case)), *shown)
        return made


def _heading(name: str) -> str:
    return name.replace(".", ".\n").replace(" ", "\n")


def _cell(name: str, line: TableRow, reasons: Notes) -> Text:
    cell = line.cells[name]
    if isinstance(cell, Empty):
        known = "" if cell.reason == UNMEASURED else f" {reasons.of(cell.reason)[0]}"
        return Text(f"{ABSENT}{known}", "dim")
    return Text.assemble(
        (_short(cell.milliseconds), "bold" if name == fastest(line) else ""), *_ratio(line, cell)
    )


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 10 else number(milliseconds)


def _ratio(line: TableRow, cell: Cell) -> list[tuple[str, str]]:
    row = RowRatio.of(line, cell)
    return [(f" {row.ratio.estimate:.2f}{mark(row)}", STYLES[row.outcome])] if row else []


def _line(text: str, style: str) -> Text:
    return Text(" ".join(visible(text).split()), style, no_wrap=True, overflow="ellipsis")
