"""A comparison as one HTML page without network access, scripts or other files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median

from coda_agent.agent.reporting.charts import element, number
from coda_agent.agent.reporting.pages import macro
from coda_agent.agent.reporting.pages import page as render
from coda_agent.comparison.competitors import COLUMNS, LLM
from coda_agent.comparison.drawing.cells import NAMES, Empty, TableRow, lines
from coda_agent.comparison.drawing.charts import TITLES
from coda_agent.comparison.drawing.sheets import (
    ABSENT,
    CLAIMED,
    MIB,
    SUMMARY,
    VERDICT,
    claimed,
    columns_of,
    legend,
    noted,
    rivals,
    sheets,
    summed,
)
from coda_agent.comparison.drawing.summary import (
    NOTHING,
    RowRatio,
    Summary,
    against,
    conditions_text,
    findings,
    ordered,
    ratio_text,
)
from coda_agent.comparison.results import Loss, Results

TITLE = "CODA's operators: kernels by an LLM, by people, and what is used today"
COLUMN_HEADINGS = (
    "column",
    "arm",
    "ms",
    f"over {LLM}",
    "error: relative, in yardsticks",
    "MiB",
    "processes",
    "notes",
)
SESSION_HEADINGS = (
    "session",
    "process",
    "date",
    "arm",
    "median ms",
    "least",
    "most",
    "rounds",
    "s to prepare",
    "what it was",
    "",
)


def page(results: Results, drawn: Mapping[str, bytes], columns: Collection[str] = NAMES) -> str:
    """The text of the page. ``drawn``: the charts' files by name; the page uses the .svg files."""
    found = ordered(lines(results, columns))
    if not found:
        return render("comparison.html", title=TITLE, measured=NOTHING, columns=())
    tables, notes = sheets(found)
    vectors = {Path(name).stem: file.decode() for name, file in drawn.items() if name.endswith(".svg")}
    return render(
        "comparison.html",
        title=TITLE,
        measured=conditions_text(results),
        columns=legend(results, columns_of(found)),
        summaries=[_summary(against(found, column)) for column in rivals(found)],
        summary_headings=SUMMARY,
        verdict=VERDICT,
        claim_headings=CLAIMED,
        claims=[claimed(finding) for finding in findings(found)],
        charts=[(element(name, TITLES[name], svg), TITLES[name]) for name, svg in vectors.items()],
        sheets=tables,
        notes=dict(notes),
        column_headings=COLUMN_HEADINGS,
        session_headings=SESSION_HEADINGS,
        rows=[_row(line, results) for line in found],
    )


def _summary(found: Summary) -> tuple[str, str, list[tuple[str, ...]]]:
    return f"{LLM} against {found.column}", str(found), summed(found)


def _row(line: TableRow, results: Results) -> tuple[str, list[tuple[str, ...]], list[tuple[str, ...]]]:
    sizes = ", ".join(f"{dim} {size}" for dim, size in line.sizes.items())
    title = f"{line.operator} {line.case}: {sizes}; roofline {number(line.roofline)} ms"
    return title, [_column(line, name) for name in line.cells], _sessions(line, results)


def _column(line: TableRow, name: str) -> tuple[str, ...]:
    """A column's cells under the headings COLUMN_HEADINGS. The cell "processes" is the number of processes
    that measured the ratio, or the time if there is no ratio."""
    cell = line.cells[name]
    if isinstance(cell, Empty):
        return (name, ABSENT, *[""] * 5, cell.reason)
    ratio = ""
    if row := RowRatio.of(line, cell):
        parts = {
            "through the reference arm": row.indirect,
            "of one process": row.alone,
            "of an impossible time": row.doubted,
        }
        ratio = ", ".join([ratio_text(row.ratio), *(words for words, needed in parts.items() if needed)])
    losses = "\n".join(f"{output}: {_loss(loss)}" for output, loss in cell.losses.items())
    memory, notes = f"{cell.bytes / MIB:,.1f}", "; ".join(filter(None, noted(line, name, cell)))
    return name, cell.arm, number(cell.milliseconds), ratio, losses, memory, str(cell.processes), notes


def _loss(loss: Loss) -> str:
    return f"{loss.relative:.2e}, {loss.yardsticks:.2f}"


def _sessions(line: TableRow, results: Results) -> list[tuple[str, ...]]:
    """One table row per session and arm, for the arms of the columns in ``line``. An arm is marked if it has
    changed since its session."""
    sessions = results.of(line.operator, line.case)
    arms = {arm for column in COLUMNS if column.name in line.cells for arm in column.arms}
    last = {name: arm.key for session in sessions for name, arm in session.arms.items()}
    if present := results.latest(line.operator, line.case):
        last |= present.keys
    rows: list[tuple[str, ...]] = []
    for place, session in enumerate(sessions, 1):
        start = (f"{place}", f"{session.process}", macro("span", session.date[:19].replace("T", " "), ""))
        for name, arm in ((n, a) for n, a in session.arms.items() if n in arms):
            times = arm.milliseconds
            figures = [number(figure) for figure in (median(times), min(times), max(times))]
            state = "" if arm.key == last[name] else "has changed since"
            rows.append((*start, name, *figures, str(len(times)), f"{arm.seconds:g}", arm.key, state))
        rows += [
            (*start, name, ABSENT, "", "", "", "", failure.key, failure.reason)
            for name, failure in session.failed.items()
            if name in arms
        ]
        if session.seconds:
            rows.append((*start, "all of them", "", "", "", "", f"{session.seconds:g}", "", ""))
    return rows
