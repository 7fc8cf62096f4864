"""A comparison as one HTML page that needs no network, script or other file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median

from coda_agent.agent.reporting.charts import number
from coda_agent.agent.reporting.markup import Html, details, document, element, facts, table
from coda_agent.comparison import charts
from coda_agent.comparison.cells import NAMES, Empty, Line, lines
from coda_agent.comparison.competitors import COLUMNS, LLM
from coda_agent.comparison.markdown import (
    ABSENT,
    CLAIMED,
    MIB,
    SUMMARY,
    VERDICT,
    Entry,
    Notes,
    Sheet,
    claimed,
    columns_of,
    legend,
    noted,
    rivals,
    sheets,
    summed,
)
from coda_agent.comparison.results import Loss, Results
from coda_agent.comparison.summary import NOTHING, Row, Summary, against, findings, measured, ordered, shown

TITLE = "CODA's operators: kernels by an LLM, by people, and what is used today"
_ROOT = re.compile(r"<svg\b.*</svg>", re.DOTALL)  # without the XML header and its DTD
_NAME = re.compile(r'(\bid="|href="#|url\(#)')


def page(results: Results, drawn: Mapping[str, bytes], columns: Collection[str] = NAMES) -> str:
    """The page's text. ``drawn``: the charts' files by name; the page takes the .svg ones."""
    found = ordered(lines(results, columns))
    if not found:
        return document(TITLE, element("h1", TITLE), element("p", NOTHING))
    tables, notes = sheets(found)
    return document(
        TITLE,
        element("header", element("h1", TITLE), element("p", measured(results))),
        _legend(results, columns_of(found)),
        *(_summary(against(found, column)) for column in rivals(found)),
        _claims(found),
        _charts(drawn),
        *(_sheet(sheet, notes) for sheet in tables),
        _notes(notes),
        element("section", element("h2", "Rows"), *(_row(line, results) for line in found)),
    )


def _legend(results: Results, names: Sequence[str]) -> Html:
    return element("section", element("h2", "Columns"), facts(legend(results, names)))


def _summary(found: Summary) -> Html:
    told = element("p", str(found))
    rows = summed(found)
    shown_rows = [table("Geometric means over an operator's rows", SUMMARY, rows)] if rows else []
    return element("section", element("h2", f"{LLM} against {found.column}"), told, *shown_rows)


def _claims(found: Sequence[Line]) -> Html:
    rows = [claimed(finding) for finding in findings(found)]
    return element("section", element("h2", "The paper's claims"), table(VERDICT, CLAIMED, rows), id="claims")


def _charts(drawn: Mapping[str, bytes]) -> Html:
    vectors = {Path(name).stem: file.decode() for name, file in drawn.items() if name.endswith(".svg")}
    shown_charts = [
        element("figure", _inline(name, svg), element("figcaption", charts.TITLES[name]), style="margin: 0")
        for name, svg in vectors.items()
    ]
    return element("section", element("h2", "Charts"), *shown_charts)


def _inline(name: str, svg: str) -> Html:
    """A chart as an element whose ids no other chart of the page has."""
    root = _ROOT.search(svg)
    assert root is not None
    return Html(
        _NAME.sub(rf"\g<1>{name}-", root[0]).replace(
            "<svg ", f'<svg role="img" aria-label="{charts.TITLES[name]}" ', 1
        )
    )


def _sheet(sheet: Sheet, notes: Notes) -> Html:
    texts = dict(notes)
    rows, last = [], ""
    for operator, case, entries in sheet.rows:
        named = operator if operator != last else ""
        rows.append((named, element("span", case), *(_entry(entry, texts) for entry in entries)))
        last = operator
    headings = ("operator", "case", *sheet.columns)
    shown_rows = table("By operator and case", headings, rows)
    return element("section", element("h2", sheet.title), element("p", sheet.says), shown_rows)


def _entry(entry: Entry, texts: dict[int, str]) -> Html:
    text = element("strong", entry.text) if entry.best else element("span", entry.text)
    links = [
        element("a", str(place), href=f"#note-{place}", title=texts[place], style="color: inherit")
        for place in entry.notes
    ]
    numbers = element("sup", Html(", ".join(links)), class_="dim", style="line-height: 0")
    return Html(text + numbers) if links else text


def _notes(notes: Notes) -> Html:
    listed = [element("li", text, id=f"note-{place}", class_="words") for place, text in notes]
    return element("section", element("h2", "Notes"), element("ol", *listed)) if listed else Html()


def _row(line: Line, results: Results) -> Html:
    sizes = ", ".join(f"{dim} {size}" for dim, size in line.sizes.items())
    headings = (
        "column",
        "arm",
        "ms",
        f"over {LLM}",
        "error: relative, in yardsticks",
        "MiB",
        "processes",
        "notes",
    )
    return details(
        f"{line.operator} {line.case}: {sizes}; roofline {number(line.roofline)} ms",
        table("Columns", headings, [_column(line, name) for name in line.cells]),
        details("Samples", _sittings(line, results)),
    )


def _column(line: Line, name: str) -> tuple[str, ...]:
    """A column's cells; ``processes`` counts those behind the ratio, or behind the time where there is none.
    """
    cell = line.cells[name]
    if isinstance(cell, Empty):
        return (name, ABSENT, *[""] * 5, cell.reason)
    ratio = ""
    if row := Row.of(line, cell):
        parts = {
            "through the anchor": row.anchored,
            "of one process": row.alone,
            "of a time that cannot be": row.doubted,
        }
        ratio = ", ".join([shown(row.ratio), *(words for words, needed in parts.items() if needed)])
    losses = "\n".join(f"{output}: {_loss(loss)}" for output, loss in cell.losses.items())
    memory, notes = f"{cell.bytes / MIB:,.1f}", "; ".join(filter(None, noted(line, name, cell)))
    return name, cell.arm, number(cell.milliseconds), ratio, losses, memory, str(cell.processes), notes


def _loss(loss: Loss) -> str:
    return f"{loss.relative:.2e}, {loss.yardsticks:.2f}"


def _sittings(line: Line, results: Results) -> Html:
    """Every arm of the line's columns in every session; arms that have changed since are marked."""
    sittings = results.of(line.operator, line.case)
    arms = {arm for column in COLUMNS if column.name in line.cells for arm in column.arms}
    last = {name: arm.key for sitting in sittings for name, arm in sitting.arms.items()}
    rows: list[tuple[str, ...]] = []
    for place, sitting in enumerate(sittings, 1):
        seat = (f"{place}", f"{sitting.process}", element("span", sitting.date[:19].replace("T", " ")))
        for name, arm in ((n, a) for n, a in sitting.arms.items() if n in arms):
            times = arm.milliseconds
            figures = [number(figure) for figure in (median(times), min(times), max(times))]
            state = "" if arm.key == last[name] else "has become another since"
            rows.append((*seat, name, *figures, str(len(times)), f"{arm.seconds:g}", arm.key, state))
        rows += [
            (*seat, name, ABSENT, "", "", "", "", failure.key, failure.reason)
            for name, failure in sitting.failed.items()
            if name in arms
        ]
        if sitting.seconds:
            rows.append((*seat, "all of them", "", "", "", "", f"{sitting.seconds:g}", "", ""))
    headings = (
        "sitting",
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
    return table("Of every arm in every sitting, oldest first", headings, rows)
