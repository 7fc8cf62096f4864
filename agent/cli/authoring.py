"""The authoring commands: start runs, continue them, and report their results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import arguments as typed
from coda_agent.agent import setup
from coda_agent.agent.cli import sweep as sweeps
from coda_agent.agent.cli.exit_codes import ABSENT, finish
from coda_agent.agent.options import (
    IMPROVE,
    AuthoringOptions,
    BudgetOptions,
    Further,
    Gpu,
    Json,
    MeasuringOptions,
    SpecPath,
    WeakJail,
    flags,
    grouped,
    typed_options,
)
from coda_agent.agent.terminal.safe_text import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coda_agent.agent.providers import Provider
    from coda_agent.agent.run.history import Past
    from coda_agent.agent.run.runs import Run

Directory = Annotated[Path | None, typer.Option(help="Folder for handoff files. Default: the run's folder.")]
Improve = Annotated[int, IMPROVE]


@grouped
def generate(
    spec: SpecPath,
    authoring: AuthoringOptions,
    budget: BudgetOptions,
    measuring: MeasuringOptions,
    gpu: Gpu = None,
    directory: Directory = None,
    improve: Improve = 0,
    candidates: Annotated[
        int,
        typer.Option(min=1, max=9, help="Independent runs to make at once; they share the budget equally."),
    ] = 1,
    weak_jail: WeakJail = False,
    as_json: Json = False,
) -> None:
    """Have a model author a kernel for SPEC: draft, verify and repeat with feedback until it passes."""
    from coda_agent.agent.run import runs
    from coda_agent.verifier.loading import load

    path = typed.spec_file(spec)
    loaded, text = load(path), typed.source(path)
    limits = budget.limits().shared(candidates)
    header, provider = setup.new_author(loaded.name, authoring, limits, directory)
    header |= {"improve": improve, "weak_jail": weak_jail, **runs.derived_beside(path, loaded)}
    setup.need_gpu(gpu, *typed_options(measuring))
    if candidates > 1:
        names = create_runs(partial(runs.create, loaded, text), header, candidates)
        _attend(names, flags(gpu, measuring), as_json)
    else:
        _go(runs.create(loaded, text, header), gpu, measuring, as_json, provider=provider)


@grouped
def optimize(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="An accepted kernel's name, or a derived program's spec file."),
    ],
    authoring: AuthoringOptions,
    budget: BudgetOptions,
    measuring: MeasuringOptions,
    gpu: Gpu = None,
    directory: Directory = None,
    improve: Improve = 0,
    as_json: Json = False,
) -> None:
    """Have a model edit an accepted kernel's CuTeDSL, and keep an edit that is measured to be faster."""
    from coda_agent.agent.run import runs
    from coda_agent.agent.run.optimize import base
    from coda_agent.verifier.loading import load

    path = Path(name)
    derived = path.suffix == ".yaml" and runs.derived_program(path, load(path, check=False)) is not None
    if not derived:
        path = typed.shipped(typed.SPECS / f"{typed.name_in(typed.SPECS, name)}.yaml")
    spec, name = load(path), path.stem
    if not derived:
        base(spec)  # report a missing kernel before a run is made
    header, provider = setup.new_author(name, authoring, budget.limits(), directory, edits=True)
    header |= runs.derived_beside(path, spec)
    header |= {"improve": improve, "optimizes": name}
    setup.need_gpu(gpu, *typed_options(measuring))
    _go(runs.create(spec, typed.source(path), header), gpu, measuring, as_json, provider=provider)


@grouped
def primitive(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The primitive that specs/primitives/NAME.yaml proposes.")
    ],
    authoring: AuthoringOptions,
    budget: BudgetOptions,
    gpu: Gpu = None,
    directory: Directory = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Only write NAME.yaml, with this definition in torch, such as 'x / (1 + abs(x))'."),
    ] = None,
    arguments: Annotated[str, typer.Option(help="With --reference: the arguments, such as x,y.")] = "x",
    merge: Annotated[
        bool, typer.Option("--merge", help="Only write a patch for git apply, from the primitive's last run.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The patch. Default: NAME.patch.")] = None,
    as_json: Json = False,
) -> None:
    """Have a model write a missing elementwise primitive in CuTeDSL, and check it against PyTorch."""
    from coda_agent.agent.artifacts import primitive as proposals

    name = typed.name_in(proposals.PROPOSED, name)
    if reference is None:
        typed.refuse_unused("it belongs to --reference; leave it out", arguments=arguments != "x")
    if not merge:
        typed.refuse_unused("it belongs to --merge; leave it out", out=out)
    if merge or reference is not None:
        done = "--merge only writes a patch" if merge else "--reference only writes a proposal"
        asked = {"gpu": gpu is not None, "directory": directory, "json": as_json}
        asked["reference"] = merge and reference is not None
        typed.refuse_unused(f"{done}; leave it out", *typed_options(authoring, budget), **asked)
    if merge:
        path, outcome, lacking = proposals.merge(name, out)
        echo(f"{path}: {outcome.report.status}. Read it, then: git apply {path}")
        if lacking:
            echo(f"coda-agent: {lacking}", err=True)
        return
    if reference is not None:
        path = proposals.scaffold(name, reference, [a.strip() for a in arguments.split(",")])
        echo(f"{path}:\n{typed.source(path)}\nComplete it, then: coda-agent primitive {name}")
        return
    path = proposals.proposed(name)
    header, provider = setup.new_author(name, authoring, budget.limits(), directory, edits=True)
    setup.need_gpu(gpu)
    _go(proposals.start(path, header), gpu, MeasuringOptions(), as_json, provider=provider)


@grouped
def resume(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or folders of runs.")],
    budget: BudgetOptions,
    further: Further,
    measuring: MeasuringOptions,
    gpu: Gpu = None,
    ray: sweeps.Ray = None,
    readmit: sweeps.Readmit = None,
    as_json: Json = False,
) -> None:
    """Continue runs that were interrupted, ran out of budget, or got an imported measurement. Several runs
    continue at once. Options given here replace those of each run. RUN may also be a sweep's name."""
    from coda_agent.agent.fleet.sweep import is_sweep
    from coda_agent.agent.run import runs

    if len(run) == 1 and is_sweep(run[0]):
        sweeps.resume(run[0], budget, measuring, gpu, ray, as_json, further, readmit or ())
        return
    typed.refuse_unused("it is for a sweep; leave it out", ray=ray, readmit=readmit)
    setup.need_gpu(gpu, *typed_options(measuring))
    run = list(dict.fromkeys(runs.folder(name).name for name in run))  # a run that was given twice
    for name in run:
        header = setup.header_of(name)
        setup.refuse_idle(header["provider"], *typed_options(further))
        setup.refuse_uncounted(header["provider"], budget.limits(), header.get("model"))
    if len(run) > 1:
        _attend(run, flags(gpu, budget, further, measuring), as_json)
    else:
        given = further.header() | {"limits": budget.limits().to_json()}
        _go(runs.reopen(run[0]), gpu, measuring, as_json, given)


def create_runs(create: Callable[[dict[str, Any]], Run], header: dict[str, Any], number: int) -> list[str]:
    """Create ``number`` runs without starting them; return their names."""
    names: list[str] = []
    directory = header["directory"]
    for place in range(1, number + 1):
        own: dict[str, Any] = {"candidate": place, "candidates": number}
        own |= {"group": names[0]} if names else {}  # a group has the name of its first run
        own |= {"directory": str(Path(directory) / str(place))} if directory else {}
        run = create(header | own)
        run.journal.close()
        names.append(run.name)
    return names


def _attend(names: list[str], flags: list[str], as_json: bool) -> None:
    """Continue several runs at once; then print the best run's report, and one line for each other run."""
    from coda_agent.agent.reporting import candidates_view
    from coda_agent.agent.run import candidates
    from coda_agent.agent.run.history import UNDECIDED

    console = setup.console(as_json)
    try:
        with candidates.started(names, flags) as started:
            best, *others = candidates_view.attend(started, console)
    except KeyboardInterrupt:
        echo(f"continue with: coda-agent resume {' '.join(names)}", err=True)
        raise
    none = best.past.status == UNDECIDED
    for ended in [*others, best] if none else others:
        console.print(_result_line(ended.past), soft_wrap=True)
    if none:
        again = f"coda-agent resume {' '.join(names)}"
        echo(f"coda-agent: no run has a verified kernel yet: {again}", err=True)
        raise typer.Exit(best.status if best.status > 0 else ABSENT)
    console.print(f"best run: {best.past.run}")
    finish(setup.run_result(best.past.run).report, as_json, best.past.run)


def _result_line(past: Past) -> str:
    """One line with a run's status, and the reason why the run stopped, if any."""
    words = f"{past.run}: {past.status} {past.why}".rstrip()
    return f"{words}, stopped: {past.stopped}" if past.stopped else words


def _go(
    run: Run,
    gpu: bool | None,
    measuring: MeasuringOptions,
    as_json: bool,
    given: Mapping[str, Any] | None = None,
    provider: Provider | None = None,
) -> None:
    """Continue a run until it ends, and report the result."""
    from coda_agent.agent.reporting import progress, render
    from coda_agent.primitives.lang.ir import OPERATIONS

    console = setup.console(as_json)
    console.print(f"run {run.name}, provider {run.journal.header['provider']}")
    try:
        with progress.LiveView(console, run.name) as watch:
            measure = setup.measurer(gpu, measuring.options(), watch)
            outcome = setup.author(run, watch, measure, given, provider)
    except KeyboardInterrupt:
        echo(f"continue with: coda-agent resume {run.name}", err=True)
        raise
    finally:
        run.journal.close()
    if not as_json:
        console.print(render.credits(outcome))
    if outcome.stopped:
        echo(f"coda-agent: {outcome.stopped}", err=True)
    proposed = "proposes" in run.journal.header
    if proposed and run.spec.name not in OPERATIONS and outcome.report.status != "rejected":
        console.print(f"next: coda-agent primitive {run.spec.name} --merge")
    finish(outcome.report, as_json, "" if proposed else run.name)
