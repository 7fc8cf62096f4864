"""``coda-agent compare``: measure what is missing of a comparison, and draw it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments, extras, setup
from coda_agent.agent.options import grouped, spelled
from coda_agent.agent.reporting.safe_text import echo
from coda_agent.comparison.options import Choice, Drawing, Effort
from coda_agent.primitives.errors import Absent, InvalidInput

if TYPE_CHECKING:
    from coda_agent.comparison.competitors import Column
    from coda_agent.comparison.drawing.cells import Line
    from coda_agent.comparison.measuring import Asked
    from coda_agent.comparison.results import Results
    from coda_agent.verifier.gates import Progress

RESULTS, TABLE, PAGE = "results.json", "table.md", "comparison.html"


@grouped
def compare(
    choice: Choice,
    effort: Effort,
    drawing: Drawing,
    drawn_from: Annotated[
        Path | None, typer.Option("--from", metavar="RESULTS", help="Draw these results; needs no GPU.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Only make the environment that CODA's own package needs.")
    ] = False,
) -> None:
    """Compare accepted kernels with people's, and with what is used today, on this H100."""
    from coda_agent.comparison import environment

    if install:
        why = "--install only makes an environment; leave it out, and compare then"
        arguments.refuse_unused(why, *spelled(choice, effort, drawing), **{"from": drawn_from})
        echo(environment.install())
    elif drawn_from:
        why = "--from draws what was measured; to measure more, leave --from out and give --out its folder"
        arguments.refuse_unused(why, *spelled(effort))
        _redraw(drawn_from, choice, drawing)
    else:
        _race(choice, effort, drawing)


def _redraw(path: Path, choice: Choice, drawing: Drawing) -> None:
    """Results that are there already."""
    from coda_agent.comparison import results
    from coda_agent.comparison.competitors import MATMUL

    named = [column.name for column in _columns(choice.columns or ())]
    _check(drawing)
    found = results.read(path / RESULTS if path.is_dir() else path)
    _shown(View(found.chosen(choice.operators, choice.cases or ()), (*named, MATMUL)), drawing)


def _race(choice: Choice, effort: Effort, drawing: Drawing) -> None:
    """Measure what is missing, and draw all that there is then."""
    from coda_agent.agent.artifacts.gpu_lock import gpu_alone
    from coda_agent.comparison import measuring, results
    from coda_agent.comparison.drawing.cells import NAMES

    asked = _asked(choice, effort)
    _check(drawing)
    path = drawing.out / RESULTS
    if not setup.use_gpu(None):
        raise Absent("comparing takes an H100, and there is none here; results are drawn by --from")
    with gpu_alone(lambda words: echo(f"coda-agent: {words}", err=True)):
        found = results.read(path) if path.exists() else results.Results()  # another may have added to them
        found, ended = _measured(asked, found, path, quiet=drawing.as_json)
    _shown(View(found, NAMES), drawing)
    if found.failed() and not drawing.as_json:
        echo("Arms that failed are not tried again but with --again.")
    if isinstance(ended, measuring.OutOfTime):
        raise ended
    if ended:
        raise Absent(f"the comparison ended early, and what was measured is drawn: {ended}")


def _asked(choice: Choice, effort: Effort) -> Asked:
    from coda_agent.comparison import measuring, rows

    if effort.quick and choice.everything and not choice.only:
        arguments.refuse_unused("--quick has three rows; leave one of the two out", "--all")
    processes, rounds, seconds = effort.sitting
    wanted = rows.chosen(
        choice.operators, choice.cases or (), everything=choice.everything, quick=effort.quick
    )
    return measuring.Asked(
        rows=tuple(wanted),
        arms=_arms(_columns(choice.columns or ()), effort.quick, bool(choice.columns)),
        processes=processes,
        rounds=rounds,
        seconds=seconds,
        again=effort.again,
    )


@dataclass(frozen=True)
class View:
    """What is drawn: results, and names of columns."""

    results: Results
    columns: Sequence[str]

    @cached_property
    def lines(self) -> list[Line]:
        from coda_agent.comparison.drawing.cells import lines

        return lines(self.results, self.columns)


def _columns(names: Sequence[str]) -> list[Column]:
    """Those that are named, a name being one or the begin of some, in whatever case; without names, all."""
    from coda_agent.comparison.competitors import COLUMNS, ROOFLINE

    begun = {name: _begun(name.lower()) for name in names}
    for name, found in begun.items():
        if name.lower() == ROOFLINE:
            raise InvalidInput(
                f"{ROOFLINE} needs no choice: every table has it, whatever columns; leave it out of --columns"
            )
        if not found:
            known = ", ".join(column.name for column in COLUMNS)
            raise InvalidInput(f"there is no column {name!r}; --columns takes {known}")
    return [c for c in COLUMNS if not names or any(c in found for found in begun.values())]


def _begun(name: str) -> list[Column]:
    from coda_agent.comparison.competitors import COLUMNS

    exact = [column for column in COLUMNS if column.name.lower() == name]
    return exact or [column for column in COLUMNS if name and column.name.lower().startswith(name)]


def _arms(columns: Sequence[Column], quick: bool, named: bool) -> tuple[str, ...]:
    """What these columns have; of a quick look, what is soon ready, or was ``named``."""
    from coda_agent.comparison.competitors import AUTOTUNED, UPSTREAM

    left_out = (*AUTOTUNED, *(() if named else (UPSTREAM,))) if quick else ()
    return tuple(arm for column in columns for arm in column.arms if arm not in left_out)


def _measured(asked: Asked, found: Results, path: Path, *, quiet: bool) -> tuple[Results, Exception | None]:
    """What there is, and why there is no more."""
    from coda_agent.comparison import measuring, results
    from coda_agent.verifier.gates import Failed
    from coda_agent.verifier.gpu.worker import WorkerError

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
    """Every file of a comparison but its results."""
    from coda_agent.comparison.drawing import charts, html_page, markdown
    from coda_agent.comparison.drawing.summary import measured
    from coda_agent.primitives.system.files import write_atomic

    write_atomic(out / TABLE, markdown.markdown(view.results, view.columns))
    try:
        drawn = charts.draw(view.lines, measured(view.results))
    except ModuleNotFoundError as error:
        raise Absent(
            f"{error.name} is not installed, so charts and page were not drawn: {extras.remedy(error)}, "
            f"then coda-agent compare --from {out / RESULTS}"
        ) from None
    for name, file in drawn.items():
        write_atomic(out / name, file)
    write_atomic(out / PAGE, html_page.page(view.results, drawn, view.columns))


def _check(drawing: Drawing) -> None:
    """That results can be written where they are to be, while nothing is measured or drawn yet."""
    from coda_agent.comparison.drawing import markdown

    if drawing.write:
        with arguments.named(drawing.write):
            markdown.marked(drawing.write)


def _shown(view: View, drawing: Drawing) -> None:
    from coda_agent.comparison.drawing import markdown
    from coda_agent.comparison.drawing.summary import against
    from coda_agent.comparison.drawing.terminal import table

    _drawn(view, drawing.out)
    if drawing.write:
        with arguments.named(drawing.write):
            markdown.write(drawing.write, view.results, view.columns)
    if drawing.as_json:
        told = {"rows": [asdict(row) for row in view.lines]}
        echo(json.dumps(told, indent=1, default=lambda loss: loss.model_dump()))
        return
    setup.console(False).print(table(view.results, columns=view.columns))
    for rival in markdown.rivals(view.lines):
        echo(str(against(view.lines, rival)))
    echo(f"{drawing.out / TABLE}, {drawing.out / PAGE} and charts beside them")
