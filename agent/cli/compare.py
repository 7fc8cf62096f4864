"""``coda-agent compare``: measure the missing results of a comparison, and draw all its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments, extras, setup
from coda_agent.agent.cli.sweep import Ray, fleet, spreads
from coda_agent.agent.options import grouped, typed_options
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.comparison.options import Choice, Drawing, Effort
from coda_agent.primitives.errors import Absent, InvalidInput

if TYPE_CHECKING:
    from coda_agent.comparison.competitors import Column
    from coda_agent.comparison.drawing.cells import TableRow
    from coda_agent.comparison.measuring import ComparisonRequest
    from coda_agent.comparison.results import Results
    from coda_agent.verifier.gates import Progress

RESULTS, TABLE, PAGE = "results.json", "table.md", "comparison.html"


@grouped
def compare(
    choice: Choice,
    effort: Effort,
    drawing: Drawing,
    drawn_from: Annotated[
        Path | None, typer.Option("--from", metavar="RESULTS", help="Only draw these results. Needs no GPU.")
    ] = None,
    ray: Ray = None,
    install: Annotated[
        bool, typer.Option("--install", help="Only create the environment for CODA's own package.")
    ] = False,
) -> None:
    """Compare accepted kernels on this H100 with hand-written kernels, libraries and torch.compile."""
    from coda_agent.comparison import environment

    if install:
        why = "--install only creates an environment; compare afterwards, without it"
        arguments.refuse_unused(
            why, *typed_options(choice, effort, drawing), **{"from": drawn_from, "ray": ray}
        )
        echo(environment.install())
    elif drawn_from:
        why = "--from draws existing results; to measure more, leave --from out and give its folder to --out"
        arguments.refuse_unused(why, *typed_options(effort), ray=ray)
        _redraw(drawn_from, choice, drawing)
    else:
        _race(choice, effort, drawing, ray)


def _redraw(path: Path, choice: Choice, drawing: Drawing) -> None:
    """Draw existing results."""
    from coda_agent.comparison import results
    from coda_agent.comparison.competitors import MATMUL

    named = [column.name for column in _columns(choice.columns or ())]
    _check(drawing)
    found = results.read(path / RESULTS if path.is_dir() else path)
    _print(View(found.chosen(choice.operators, choice.cases or ()), (*named, MATMUL)), drawing)


def _race(choice: Choice, effort: Effort, drawing: Drawing, ray: str | None) -> None:
    """Measure missing results, then draw all results."""
    from coda_agent.comparison import measuring, results
    from coda_agent.comparison.drawing.cells import NAMES

    asked = _request(choice, effort)
    _check(drawing)
    path = drawing.out / RESULTS
    if ray is None and not setup.use_gpu(None):
        raise Absent("comparing needs an H100, and none is here; draw existing results with --from")
    with setup.free_stdout(drawing.as_json), _gpus(ray) as measure:
        # read after the wait for the GPU, because another process may have added results during the wait
        found = results.read(path) if path.exists() else results.Results()
        found, ended = _measure(measure, asked, found, path, quiet=drawing.as_json)
    _print(View(found, NAMES), drawing)
    if found.failed() and not drawing.as_json:
        echo("Failed arms are retried only with --again.")
    if isinstance(ended, measuring.OutOfTime):
        raise ended
    if ended:
        raise Absent(f"the comparison ended early; the results so far are drawn: {ended}")


@contextmanager
def _gpus(ray: str | None) -> Iterator[Callable[..., Results]]:
    """Yield a function that measures arms, on this machine's GPUs or on a Ray cluster."""
    from coda_agent.agent.storage.gpu_lock import gpu_alone
    from coda_agent.comparison import measuring, spread

    if spreads(ray):
        with fleet(ray) as pool:
            yield partial(spread.measure, pool=pool)
    else:
        with gpu_alone(lambda words: echo(f"coda-agent: {words}", err=True)):
            yield measuring.measure


def _request(choice: Choice, effort: Effort) -> ComparisonRequest:
    from coda_agent.comparison import measuring, rows

    if effort.quick and choice.everything and not choice.only:
        arguments.refuse_unused("--quick has three rows; leave one of the two out", "--all")
    processes, rounds, seconds = effort.limits
    wanted = rows.choose_rows(
        choice.operators, choice.cases or (), everything=choice.everything, quick=effort.quick
    )
    return measuring.ComparisonRequest(
        rows=tuple(wanted),
        arms=_arms(_columns(choice.columns or ()), effort.quick, bool(choice.columns)),
        processes=processes,
        rounds=rounds,
        seconds=seconds,
        again=effort.again,
    )


@dataclass(frozen=True)
class View:
    """The results to draw, and the names of the competitors (columns)."""

    results: Results
    columns: Sequence[str]

    @cached_property
    def lines(self) -> list[TableRow]:
        from coda_agent.comparison.drawing.cells import lines

        return lines(self.results, self.columns)


def _columns(names: Sequence[str]) -> list[Column]:
    """The columns with these names, or all columns if ``names`` is empty. A name may be a prefix of a
    column's name, in upper or lower case."""
    from coda_agent.comparison.competitors import COLUMNS, ROOFLINE

    begun = {name: _columns_starting(name.lower()) for name in names}
    for name, found in begun.items():
        if name.lower() == ROOFLINE:
            raise InvalidInput(f"every table has {ROOFLINE}; leave it out of --columns")
        if not found:
            known = ", ".join(column.name for column in COLUMNS)
            raise InvalidInput(f"no column {name!r}; --columns takes {known}")
    return [c for c in COLUMNS if not names or any(c in found for found in begun.values())]


def _columns_starting(name: str) -> list[Column]:
    from coda_agent.comparison.competitors import COLUMNS

    exact = [column for column in COLUMNS if column.name.lower() == name]
    return exact or [column for column in COLUMNS if name and column.name.lower().startswith(name)]


def _arms(columns: Sequence[Column], quick: bool, named: bool) -> tuple[str, ...]:
    """The arms of these columns. A quick comparison leaves out slow arms. If the user has not ``named`` the
    columns, a quick comparison also leaves out CODA's own package."""
    from coda_agent.comparison.competitors import AUTOTUNED, UPSTREAM

    left_out = (*AUTOTUNED, *(() if named else (UPSTREAM,))) if quick else ()
    return tuple(arm for column in columns for arm in column.arms if arm not in left_out)


def _measure(
    measure: Callable[..., Results], asked: ComparisonRequest, found: Results, path: Path, *, quiet: bool
) -> tuple[Results, Exception | None]:
    """Measure the requested arms. Return all results so far, and the error that stopped the measurement, or
    None."""
    from coda_agent.agent.fleet.pool import GivenUp
    from coda_agent.comparison import measuring, results
    from coda_agent.verifier.gates import Failed
    from coda_agent.verifier.worker import WorkerError

    with _watched(found, quiet) as (progress, shows):

        def keep(made: Results) -> None:
            nonlocal found
            found = made
            results.write(path, made)
            shows(made)

        try:
            return measure(asked, found, keep, progress), None
        except (measuring.OutOfTime, Failed, GivenUp, WorkerError) as error:
            return found, error


@contextmanager
def _watched(found: Results, quiet: bool) -> Iterator[tuple[Progress, Any]]:
    """Yield a function that takes progress messages, and a function that takes new results. If ``quiet`` is
    true, both do nothing. Otherwise, both update a table on a terminal. Without a terminal, the first prints
    each message as a line, and the second does nothing."""
    from rich.live import Live

    from coda_agent.comparison.drawing.terminal import table

    console, shown = setup.console(True), found

    def said(place: str, words: str) -> None:
        if not quiet:
            echo(f"{place}: {words}", err=True)

    if quiet or not console.is_terminal:
        yield said, lambda made: None
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def keep(made: Results) -> None:
            nonlocal shown
            shown = made

        yield lambda place, words: live.update(table(shown, f"{place}: {words}")), keep


def _drawn(view: View, out: Path) -> None:
    """Write every file of a comparison except its results."""
    from coda_agent.comparison.drawing import charts, html_page, markdown
    from coda_agent.comparison.drawing.summary import conditions_text
    from coda_agent.primitives.system.files import write_atomic

    write_atomic(out / TABLE, markdown.markdown(view.results, view.columns))
    try:
        drawn = charts.draw(view.lines, conditions_text(view.results))
    except ModuleNotFoundError as error:
        raise Absent(
            f"{error.name} is not installed, so the charts and the page were not drawn: "
            f"{extras.remedy(error)}, then coda-agent compare --from {out / RESULTS}"
        ) from None
    for name in charts.FILES:
        if name in drawn:
            write_atomic(out / name, drawn[name])
        else:  # an earlier drawing's chart would show other results than the table
            (out / name).unlink(missing_ok=True)
    write_atomic(out / PAGE, html_page.page(view.results, drawn, view.columns))


def _check(drawing: Drawing) -> None:
    """Check that tables can be written into the file of --write, and that --out can be a folder, before
    anything is measured or drawn."""
    from coda_agent.comparison.drawing import markdown

    there = next(path for path in (drawing.out, *drawing.out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"--out {drawing.out}: {there} is not a folder; give another folder")
    if drawing.write:
        with arguments.naming_file(drawing.write):
            markdown.marked(drawing.write)


def _print(view: View, drawing: Drawing) -> None:
    from coda_agent.comparison.drawing import markdown
    from coda_agent.comparison.drawing.sheets import rivals
    from coda_agent.comparison.drawing.summary import against
    from coda_agent.comparison.drawing.terminal import table

    _drawn(view, drawing.out)
    if drawing.write:
        with arguments.naming_file(drawing.write):
            markdown.write(drawing.write, view.results, view.columns)
    if drawing.as_json:
        told = {"rows": [asdict(row) for row in view.lines]}
        echo(json.dumps(told, indent=1, default=lambda loss: loss.model_dump()))
        return
    setup.console(False).print(table(view.results, columns=view.columns))
    for rival in rivals(view.lines):
        echo(str(against(view.lines, rival)))
    echo(f"{drawing.out / TABLE}, {drawing.out / PAGE} and charts in the same folder")
