"""``coda-agent compare``: measure what is missing of a comparison, and draw it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent import session

if TYPE_CHECKING:
    from agent.compare.measuring import Asked
    from agent.compare.results import Results
    from verifier.gates import Progress

RESULTS, TABLE, PAGE = "results.json", "table.md", "comparison.html"
PROCESSES, ROUNDS = 3, 40
QUICK_ROUNDS = 15

Names = list[str] | None


def compare(
    out: Annotated[
        Path, typer.Option(help="Folder of results, tables and charts; what is there is not measured again.")
    ] = Path("comparison"),
    only: Annotated[
        Names, typer.Option(metavar="OPERATOR", help="Only this operator. May be repeated.")
    ] = None,
    columns: Annotated[
        Names, typer.Option(metavar="COLUMN", help="Only this column (and matmul). May be repeated.")
    ] = None,
    cases: Annotated[Names, typer.Option(metavar="CASE", help="Only this case. May be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every spec and case, not CODA's ten.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three rows in one process, nothing autotuned: two minutes.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, max=20, help="Processes that time a row.")] = PROCESSES,
    rounds: Annotated[int, typer.Option(min=12, help="Interleaved rounds at most, in each.")] = ROUNDS,
    drawn_from: Annotated[
        Path | None, typer.Option("--from", metavar="RESULTS", help="Draw these results; needs no GPU.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Only make the environment that CODA's own package needs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, for programs.")] = False,
) -> None:
    """Compare accepted kernels with people's, and with what is used today, on this H100."""
    from agent.compare import environment, measuring, results, rows

    if install:
        typer.echo(environment.install())
        return
    path = drawn_from or out / RESULTS
    found = results.read(path) if drawn_from or path.exists() else results.Results()
    if drawn_from is None:
        asked = measuring.Asked(
            rows=tuple(rows.chosen(only or (), cases or (), everything=everything, quick=quick)),
            arms=_arms(columns or (), quick),
            processes=1 if quick else processes,
            rounds=QUICK_ROUNDS if quick else rounds,
        )
        if not session.use_gpu(None):
            raise session.Absent(
                "comparing takes an H100, and there is none here; results are drawn by --from"
            )
        found = _measured(asked, found, path, quiet=as_json)
    _drawn(found, out)
    _shown(found, out, as_json)


def _arms(names: Sequence[str], quick: bool) -> tuple[str, ...]:
    """Of the named columns, a name being the begin of one in whatever case; without names, of all."""
    from agent.compare.results import ResultsError
    from verifier.columns import AUTOTUNED, COLUMNS

    begun = {name: [c for c in COLUMNS if c.name.lower().startswith(name.lower())] for name in names}
    for name, found in begun.items():
        if not found:
            known = ", ".join(column.name for column in COLUMNS)
            raise ResultsError(f"there is no column {name!r}; --columns takes {known}")
    wanted = [c for c in COLUMNS if not names or any(c in found for found in begun.values())]
    return tuple(arm for column in wanted for arm in column.arms if not (quick and arm in AUTOTUNED))


def _measured(asked: Asked, found: Results, path: Path, *, quiet: bool) -> Results:
    from agent.compare import measuring, results

    with _watched(found, quiet) as (progress, shows):

        def keep(made: Results) -> None:
            results.write(path, made)
            shows(made)

        return measuring.measure(asked, found, keep, progress)


@contextmanager
def _watched(found: Results, quiet: bool) -> Iterator[tuple[Progress, Any]]:
    """Where progress goes, and new results: a table on a terminal, else a line for each arm."""
    from rich.live import Live

    from agent.compare.terminal import table

    console, shown = session.console(True), found

    def said(place: str, words: str) -> None:
        if not quiet:
            typer.echo(f"{place}: {words}", err=True)

    if quiet or not console.is_terminal:
        yield said, lambda made: None
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def keep(made: Results) -> None:
            nonlocal shown
            shown = made

        yield lambda place, words: live.update(table(shown, f"{place}: {words}")), keep


def _drawn(found: Results, out: Path) -> None:
    """Every file of a comparison but its results."""
    from agent.compare import charts, markdown, page
    from agent.compare.cells import lines
    from primitives.files import write_atomic

    write_atomic(out / TABLE, markdown.markdown(found))
    try:
        drawn = charts.draw(lines(found))
    except ModuleNotFoundError as error:
        raise session.Absent(
            f"{error.name} is not installed, so charts and page were not drawn: pip install {error.name}, "
            f"then coda-agent compare --from {out / RESULTS}"
        ) from None
    for name, file in drawn.items():
        write_atomic(out / name, file)
    write_atomic(out / PAGE, page.page(found, drawn))


def _shown(found: Results, out: Path, as_json: bool) -> None:
    from agent.compare.cells import lines
    from agent.compare.summary import RIVALS, against
    from agent.compare.terminal import table

    rows = lines(found)
    if as_json:
        told = {"rows": [asdict(row) for row in rows]}
        json.dump(told, sys.stdout, indent=1, default=lambda loss: loss.model_dump())
        return
    session.console(False).print(table(found))
    for rival in RIVALS:
        typer.echo(str(against(rows, rival)))
    typer.echo(f"{out / TABLE}, {out / PAGE} and charts beside them")
