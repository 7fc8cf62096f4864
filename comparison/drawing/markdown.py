"""A comparison as Markdown: its tables, and the whole page."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from coda_agent.agent.terminal.safe_text import visible
from coda_agent.comparison.competitors import COMPILE, HUMAN, LLM, composed
from coda_agent.comparison.drawing import summary
from coda_agent.comparison.drawing.cells import NAMES, TableRow, lines
from coda_agent.comparison.drawing.sheets import (
    ABSENT,
    CLAIMED,
    SUMMARY,
    VERDICT,
    CellText,
    Notes,
    Sheet,
    claimed,
    columns_of,
    legend,
    ratios,
    rivals,
    sheets,
    summed,
)
from coda_agent.comparison.drawing.summary import (
    NOTHING,
    WHOLE,
    CheckedClaim,
    Summary,
    against,
    conditions_text,
    findings,
)
from coda_agent.comparison.results import Results
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import filled, markdown_table, places

HEADLINE = ("operator", "sizes", "`torch.compile`", "QuACK")
_MARKUP = re.compile(r"[\\`*_\[\]|~#!$]")  # characters that can be markup anywhere in a line of Markdown


def markdown(results: Results, columns: Collection[str] = NAMES) -> str:
    """The whole page: devices and versions, tables, notes, the summary and the paper's claims."""
    found = summary.ordered(lines(results, columns))
    if not found:
        return f"{NOTHING}\n"
    tables, notes = sheets(found)
    parts = [
        f"{plain(conditions_text(results))}\n",
        _legend(results, columns_of(found)),
        *map(_sheet, tables),
    ]
    return "\n".join([*parts, *_notes(notes), *_summaries(found)])


def brief(results: Results, columns: Collection[str] = NAMES) -> str:
    """The page's short version: the table of ratios, the means by operator, and the paper's claims."""
    found = summary.ordered(lines(results, columns))
    if not found:
        return f"{NOTHING}\n"
    notes = Notes()
    parts = [f"{plain(conditions_text(results))}\n", _sheet(ratios(found, notes)), *_notes(notes)]
    return "\n".join([*parts, *_summaries(found)])


def headline(results: Results, columns: Collection[str] = NAMES) -> str:
    """A table of ratios to torch.compile and to QuACK's own kernel. A ratio is an operator's geometric mean
    over its sizes."""
    found = summary.ordered(lines(results, columns))
    compiled, human = (
        {tally.name: tally for tally in against(found, column).operators if tally.name not in WHOLE}
        for column in (COMPILE, HUMAN)
    )
    rows = [
        [
            _operator_code(name),
            f"{len(tally.rows)}",
            tally.average,
            human[name].average if name in human and not composed(name) else ABSENT,
        ]
        for name, tally in compiled.items()
    ]
    return markdown_table(HEADLINE, rows) if rows else f"{NOTHING}\n"


def write(path: Path, results: Results, columns: Collection[str] = NAMES) -> None:
    """In a Markdown file, replace the tables of ``brief`` and ``headline``. Comments in the file mark the
    place of each table.

    Raises InvalidInput if the file marks no place, or marks a place twice. Raises OSError.
    """
    text, made = marked(path), {"comparison": brief, "headline": headline}
    tables = {name: made[name](results, columns) for name in places(text) if name in made}
    write_atomic(path, filled(text, tables))


def marked(path: Path) -> str:
    """The text of a file that marks a place for ``write``. Raises the same errors as ``write``."""
    text = path.read_text(encoding="utf-8")
    names = [name for name in places(text) if name in ("comparison", "headline")]
    if not names or len(set(names)) < len(names):
        raise InvalidInput(
            f"{path}: mark one place for the comparison with <!-- table: comparison --> (or headline), and "
            "its end with <!-- /table -->"
        )
    return text


def plain(text: str) -> str:
    """Escape a text, so that Markdown shows the text unchanged, on one line. The escaped text contains no
    markup, HTML or link, and does not begin another table cell."""
    return html.escape(_MARKUP.sub(r"\\\g<0>", " ".join(visible(text).split())), quote=False)


def _legend(results: Results, names: Sequence[str]) -> str:
    return "".join(f"- **{name}**: {plain(told)}\n" for name, told in legend(results, names))


def _notes(notes: Notes) -> list[str]:
    listed = "".join(f"{place}. {plain(text)}\n" for place, text in notes)
    return [f"**Notes**\n\n{listed}"] if listed else []


def _sheet(sheet: Sheet) -> str:
    """A sheet as Markdown. Only the first row of each operator names the operator."""
    rows, last = [], ""
    for operator, case, entries in sheet.rows:
        name = _operator_code(operator) if operator != last else ""
        rows.append([name, plain(case), *map(_entry, entries)])
        last = operator
    headings = ["operator", "case", *sheet.columns]
    return f"**{sheet.title}**\n\n{sheet.says}\n\n{markdown_table(headings, rows)}"


def _entry(entry: CellText) -> str:
    text = f"**{entry.text}**" if entry.best else entry.text
    return text + (f" <sup>{', '.join(map(str, entry.notes))}</sup>" if entry.notes else "")


def _summaries(found: Sequence[TableRow]) -> list[str]:
    """The summaries and the paper's claims."""
    return [*(_summary(against(found, column)) for column in rivals(found)), _claims(findings(found))]


def _summary(found: Summary) -> str:
    told = f"**{LLM} against {found.column}**\n\n{found}\n"
    rows = [[_operator_code(name), *rest] for name, *rest in summed(found)]
    return f"{told}\n{markdown_table(SUMMARY, rows)}" if rows else told


def _claims(found: Sequence[CheckedClaim]) -> str:
    rows = [[plain(cell) for cell in claimed(finding)] for finding in found]
    return f"**The paper's claims**\n\n{VERDICT}\n\n{markdown_table(CLAIMED, rows)}"


def _operator_code(operator: str) -> str:
    return f"`{operator}`" if re.fullmatch(r"\w+", operator) else plain(operator)
