"""``coda-agent compare``: measure what is missing of a comparison, and draw it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent import session

if TYPE_CHECKING:
    from agent.compare.cells import Line
    from agent.compare.measuring import Asked
    from agent.compare.results import Results
    from verifier.columns import Column
    from verifier.gates import Progress

RESULTS, TABLE, PAGE = "results.json", "table.md", "comparison.html"
PROCESSES, ROUNDS = 3, 40
QUICK_ROUNDS, QUICK_SECONDS = 15, 120.0

Names = list[str] | None


def compare(
    out: Annotated[
        Path, typer.Option(help="Folder of results, tables and charts; what is there is not measured again.")
    ] = Path("comparison"),
    only: Annotated[
        Names,
        typer.Option(metavar="OPERATOR", help="Only this operator, or layer. May be repeated."),
    ] = None,
    columns: Annotated[
        Names, typer.Option(metavar="COLUMN", help="Only this column (and matmul). May be repeated.")
    ] = None,
    cases: Annotated[Names, typer.Option(metavar="CASE", help="Only this case. May be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every spec and case, not CODA's ten.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Three rows in one process, nothing autotuned, without CODA's own package. Begins nothing "
            "that may end after two minutes; what it takes has not been measured yet.",
        ),
    ] = False,
    processes: Annotated[int, typer.Option(min=1, max=20, help="Processes that time a row.")] = PROCESSES,
    rounds: Annotated[int, typer.Option(min=12, help="Interleaved rounds at most, in each.")] = ROUNDS,
    budget_seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Begin no sitting that may end later than this; the same command goes on."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Try again what failed before, as it is now.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Put the ratios into FILE, after <!-- table: comparison -->."),
    ] = None,
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
    from agent.compare.cells import NAMES
    from verifier.columns import MATMUL

    if install:
        typer.echo(environment.install())
        return
    chosen = _columns(columns or ())
    if drawn_from:
        path = drawn_from / RESULTS if drawn_from.is_dir() else drawn_from
        found = results.read(path).chosen(only or (), cases or ())
        named = [column.name for column in chosen]
        _shown(View(found, (*named, MATMUL)), out, write, as_json)
        return
    asked = measuring.Asked(
        rows=tuple(rows.chosen(only or (), cases or (), everything=everything, quick=quick)),
        arms=_arms(chosen, quick, bool(columns)),
        processes=1 if quick else processes,
        rounds=QUICK_ROUNDS if quick else rounds,
        seconds=budget_seconds or (QUICK_SECONDS if quick else math.inf),
        again=again,
    )
    path = out / RESULTS
    found = results.read(path) if path.exists() else results.Results()
    if not session.use_gpu(None):
        raise session.Absent("comparing takes an H100, and there is none here; results are drawn by --from")
    found, ended = _measured(asked, found, path, quiet=as_json)
    _shown(View(found, NAMES), out, write, as_json)
    if found.failed() and not as_json:
        typer.echo("Arms that failed are not tried again but with --again.")
    if isinstance(ended, measuring.OutOfTime):
        typer.echo(f"coda-agent: {ended}", err=True)
    elif ended:
        raise session.Absent(f"the comparison ended early, and what was measured is drawn: {ended}")


@dataclass(frozen=True)
class View:
    """What is drawn: results, and names of columns."""

    results: Results
    columns: Sequence[str]

    @cached_property
    def lines(self) -> list[Line]:
        from agent.compare.cells import lines

        return lines(self.results, self.columns)


def _columns(names: Sequence[str]) -> list[Column]:
    """Those that are named, a name being the begin of one in whatever case; without names, all."""
    from agent.compare.results import ResultsError
    from verifier.columns import COLUMNS

    begun = {name: [c for c in COLUMNS if c.name.lower().startswith(name.lower())] for name in names}
    for name, found in begun.items():
        if not found:
            known = ", ".join(column.name for column in COLUMNS)
            raise ResultsError(f"there is no column {name!r}; --columns takes {known}")
    return [c for c in COLUMNS if not names or any(c in found for found in begun.values())]


def _arms(columns: Sequence[Column], quick: bool, named: bool) -> tuple[str, ...]:
    """What these columns have; of a quick look, what is soon ready, or was ``named``."""
    from verifier.columns import AUTOTUNED, UPSTREAM

    left_out = (*AUTOTUNED, *(() if named else (UPSTREAM,))) if quick else ()
    return tuple(arm for column in columns for arm in column.arms if arm not in left_out)


def _measured(asked: Asked, found: Results, path: Path, *, quiet: bool) -> tuple[Results, Exception | None]:
    """What there is, and why there is no more."""
    from agent.compare import measuring, results
    from verifier.gates import Failed
    from verifier.gpu import WorkerError

    with _watched(found, quiet) as (progress, shows):

        def keep(made: Results) -> None:
            nonlocal found
            found = made
            results.write(path, made)
            shows(made)

        try:
            return measuring.measure(asked, found, keep, progress), None
        except (measuring.OutOfTime, Failed, WorkerError) as error:
            return found, error


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


def _drawn(view: View, out: Path) -> None:
    """Every file of a comparison but its results."""
    from agent.compare import charts, markdown, page
    from primitives.files import write_atomic

    write_atomic(out / TABLE, markdown.markdown(view.results, view.columns))
    try:
        drawn = charts.draw(view.lines)
    except ModuleNotFoundError as error:
        raise session.Absent(
            f"{error.name} is not installed, so charts and page were not drawn: pip install {error.name}, "
            f"then coda-agent compare --from {out / RESULTS}"
        ) from None
    for name, file in drawn.items():
        write_atomic(out / name, file)
    write_atomic(out / PAGE, page.page(view.results, drawn, view.columns))


def _shown(view: View, out: Path, write: Path | None, as_json: bool) -> None:
    from agent.compare import markdown
    from agent.compare.summary import against
    from agent.compare.terminal import table

    if write:
        markdown.write(write, view.results, view.columns)
    _drawn(view, out)
    if as_json:
        told = {"rows": [asdict(row) for row in view.lines]}
        json.dump(told, sys.stdout, indent=1, default=lambda loss: loss.model_dump())
        return
    session.console(False).print(table(view.results, columns=view.columns))
    for rival in markdown.rivals(view.lines):
        typer.echo(str(against(view.lines, rival)))
    typer.echo(f"{out / TABLE}, {out / PAGE} and charts beside them")
