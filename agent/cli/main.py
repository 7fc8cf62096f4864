"""The coda-agent command. Heavy imports stay inside the commands, so that --help is quick.

Exit status: 0 accepted or checked; 1 rejected; 2 wrong usage, spec or file; 3 something required is missing
here; 4 out of time in a comparison; 130 interrupted.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_agent.agent import arguments, setup
from coda_agent.agent.cli.authoring import generate, optimize, primitive, resume
from coda_agent.agent.cli.bundles import bundle, import_results, measure
from coda_agent.agent.cli.compare import compare
from coda_agent.agent.cli.derive import derive
from coda_agent.agent.cli.exit_codes import ABSENT, INTERRUPTED, OK, REJECTED, finish, print_error
from coda_agent.agent.cli.show import show
from coda_agent.agent.cli.sweep import sweep
from coda_agent.agent.cli.tips import tips
from coda_agent.agent.cli.tune import build, tune
from coda_agent.agent.options import Gpu, Json, MeasuringOptions, SpecPath, WeakJail, grouped, typed_options
from coda_agent.agent.terminal.safe_text import Commands, echo
from coda_agent.primitives.errors import Absent, Refused

if TYPE_CHECKING:
    from coda_agent.agent.run.loop import Outcome

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Let a language model write CODA kernels for the H100. The verifier decides whether they are "
    "correct and fast, without trusting the model.",
)
app.add_typer(tips, name="tips")


Looked = Annotated[
    bool,
    typer.Option(
        "--looked", help="Confirm that you have read the edited CuTeDSL; required to accept an edit."
    ),
]

for _command in (generate, sweep, optimize, primitive, resume, derive, tune, build):
    app.command()(_command)


@app.command()
@grouped
def verify(
    kernel: Annotated[
        Path, typer.Argument(metavar="KERNEL", help="A kernel file, or an accepted kernel's name.")
    ],
    measuring: MeasuringOptions,
    gpu: Gpu = None,
    spec: Annotated[
        Path | None, typer.Option(help="The kernel's spec. Default: NAME.yaml next to NAME.py, or in specs/.")
    ] = None,
    weak_jail: WeakJail = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure from the start, and discard an interrupted measurement.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a kernel file with every gate that this machine can run. An interrupted measurement continues."""
    from coda_agent.agent.reporting import progress
    from coda_agent.agent.storage.checkpoint import resumed
    from coda_agent.agent.storage.quack_tunings import quack
    from coda_agent.verifier.loading import load
    from coda_agent.verifier.verify import verify as run_gates

    arguments.refuse_no_source(kernel, "verify")
    kernel = arguments.accepted_file(kernel, "py")
    source = arguments.kernel_source(kernel)  # a missing source is reported before a missing spec
    loaded = load(arguments.spec_for(kernel, spec))
    setup.need_gpu(gpu, *typed_options(measuring), *(["--again"] if again else ()))
    options, here = measuring.options(), setup.use_gpu(gpu)
    with (
        progress.LiveView(setup.console(as_json)) as watch,
        resumed(options, again, watch.console.print) as keep,
    ):
        report, _ = run_gates(
            loaded,
            source,
            gpu=here,
            weak_jail=weak_jail,
            progress=watch.gate,
            options=options,
            keep=keep,
            quack=quack(loaded) if here else None,
        )
    finish(report, as_json)


for _command in (bundle, measure):
    app.command()(_command)
app.command("import")(import_results)


@app.command()
def runs(as_json: Json = False) -> None:
    """List all runs, oldest first, with status, author and cost."""
    from coda_agent.agent.run import history
    from coda_agent.agent.run.runs import runs_dir

    found = history.past()
    if as_json:
        echo(json.dumps(history.as_dict(found), indent=1))
    elif found:
        setup.console(False).print(history.as_table(found))
    else:
        echo(f"{runs_dir()}: no runs yet. Start one: coda-agent generate SPEC")


@app.command()
def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or folders of runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page. Default: in the run's folder.")
    ] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the run's events here as JSON lines, instead of a page."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about each run, or a sweep, as it is now; or one run's events as JSON lines. Another
    page compares several runs, or the candidates of one command: cost, outcome, and gain per round."""
    from coda_agent.agent.artifacts import accept as accepting
    from coda_agent.agent.fleet.sweep import is_sweep
    from coda_agent.agent.reporting import compared, sweep_view
    from coda_agent.agent.run.runs import folder

    alone = "--json prints instead of writing a page; leave one of the two out"
    sweeps = [name for name in run if is_sweep(name)]
    if sweeps and len(run) > 1:
        raise typer.BadParameter(f"{sweeps[0]} is a sweep, which has a page of its own; name it alone")
    if sweeps:
        arguments.refuse_unused("only a run has events; name one of the sweep's runs", jsonl=jsonl)
        if as_json:
            arguments.refuse_unused(alone, out=out)
            echo(json.dumps(sweep_view.as_dict(run[0]), indent=1))
            return
        with arguments.naming_file(out or Path(run[0])):
            echo(str(sweep_view.write(run[0], out)))
        return
    if jsonl and len(run) > 1:
        raise typer.BadParameter("--jsonl takes one run; name only one")
    if jsonl:
        arguments.refuse_unused("--jsonl writes the events and no page; leave it out", out=out, json=as_json)
        with arguments.naming_file(jsonl):
            echo(accepting.export(run[0], jsonl))
    elif as_json:
        arguments.refuse_unused(alone, out=out)
        echo(json.dumps(compared.as_dict(run), indent=1))
    else:
        with arguments.naming_file(out or folder(run[0])):
            echo("\n".join(map(str, compared.write(run, out))))


@app.command()
def review(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
    as_json: Json = False,
) -> None:
    """Show a run's kernel, its report and its changes. At a terminal, ask whether to accept it."""
    outcome = setup.run_result(run)
    if as_json:
        finish(outcome.report, as_json)
    from rich.syntax import Syntax

    from coda_agent.agent.artifacts import accept as accepting
    from coda_agent.agent.reporting import render

    console = setup.console(False)
    console.print(Syntax(outcome.source, "python", word_wrap=True))
    console.print(render.credits(outcome))
    render.show(console, outcome.report)
    if changes := accepting.changes(outcome):
        console.print(Syntax(changes, "diff", word_wrap=True))
    if outcome.report.status == "accepted" and sys.stdin.isatty():
        with arguments.asking():
            agreed = typer.confirm("Have you read it? Accept it and commit?")
        if agreed:
            _accept(run, commit=True, looked=True, shown=outcome)
    raise typer.Exit(REJECTED if outcome.report.status == "rejected" else OK)


@app.command()
def accept(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")],
    commit: Annotated[
        bool, typer.Option("--commit", help="Commit the files, with the measurements in the message.")
    ] = False,
    looked: Looked = False,
) -> None:
    """Put an accepted kernel and its evidence into generated_kernels/."""
    _accept(run, commit, looked)


def _accept(run: str, commit: bool, looked: bool, shown: Outcome | None = None) -> None:
    """Accept a run's kernel. ``shown``: the outcome that a person has read; if the run's outcome has changed
    since, raise Refused."""
    from coda_agent.agent.artifacts import accept as accepting
    from coda_agent.agent.run import loop, runs
    from coda_agent.primitives.system.files import ROOT

    if not (ROOT / "pyproject.toml").is_file():
        raise Absent(
            f"{ROOT} is an installed package, and kernels are accepted into a checkout: "
            f"run coda-agent accept {run} in one, with CODA_AGENT_RUNS={runs.runs_dir()}"
        )
    shown = shown or setup.run_result(run)
    opened = runs.reopen(run)
    with opened.journal:  # no other process can change the run meanwhile
        outcome = loop.result_of(opened.journal, opened.spec)
        if outcome is None or (outcome.source, outcome.report) != (shown.source, shown.report):
            raise Refused(f"run {run} changed while you read it; review it again: coda-agent review {run}")
        spec = accepting.new_spec(opened)
        paths = accepting.accept(outcome, opened.journal, looked=looked, spec=spec)
    for path in paths:
        echo(os.path.relpath(path))
    if commit:
        words = accepting.message(outcome.report, outcome.authorship)  # type: ignore[arg-type]
        echo(f"committed {accepting.commit(paths, words)}")


@app.command()
def new(
    function: Annotated[
        str, typer.Argument(metavar="FILE:FUNCTION", help="A Python file, and a function in it.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The spec to write. Default: specs/FUNCTION.yaml.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="A tensor's shape, such as x=M,K.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="A tensor's dtype, such as x=bf16.")] = None,
    dim: Annotated[list[str] | None, typer.Option(help="A size to measure at, such as M=16384.")] = None,
    init: Annotated[
        list[str] | None, typer.Option(help="An input's distribution, such as x='{uniform: [0.5, 1.5]}'.")
    ] = None,
    ask: Annotated[
        bool | None,
        typer.Option(
            "--input/--no-input", " /--yes", help="Ask for missing values. Default: only at a terminal."
        ),
    ] = None,
) -> None:
    """Draft a spec from a PyTorch function. The file is parsed, never imported."""
    from coda_agent.agent import scaffold

    asking = sys.stdin.isatty() if ask is None else ask
    options = scaffold.ScaffoldOptions.parse(asking, shape=shape, dtype=dtype, dim=dim, init=init)
    path, draft = scaffold.new(function, out, options)
    echo(f"{path}:\n{draft}\nLook at it, then: coda-agent generate {path}")


@app.command()
def prompt(spec: SpecPath) -> None:
    """Print the prompt for authors of SPEC."""
    from coda_agent.agent.prompts.prompt import assemble
    from coda_agent.verifier.loading import load

    spec = arguments.spec_file(spec)
    echo(str(assemble(load(spec), spec.read_text(encoding="utf-8"))))


@app.command()
def table(
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replace the tables at FILE's <!-- table: NAME --> comments."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print Markdown tables of accepted kernels' reports and recorded runs."""
    from coda_agent.agent.reporting import table as tables

    if write:
        arguments.refuse_unused("--write puts the tables into FILE; leave one of the two out", json=as_json)
    found = tables.read()
    if write:
        with arguments.naming_file(write):
            tables.write(write, found)
    elif as_json:
        echo(json.dumps(found.to_json(), indent=1))
    else:
        echo(str(found), nl=False)


@app.command()
def mcp(
    attempts: Annotated[int, typer.Option(min=1, max=50, help="Limit on the attempts of each run.")] = 6,
) -> None:
    """Serve MCP clients on stdin and stdout. They author kernels; a person reviews."""
    from coda_agent.agent.cli.mcp import server

    server(attempts).run("stdio")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check what works on this machine, and say how to fix the rest."""
    from coda_agent.agent.cli import doctor as doctors

    findings = doctors.check()
    if as_json:
        echo(json.dumps(doctors.as_dict(findings), indent=1))
    else:
        setup.console(False).print(doctors.table(findings))
    raise typer.Exit(OK if doctors.healthy(findings) else ABSENT)


for _command in (show, compare):
    app.command()(_command)


def _skip_last_collection() -> None:
    if "triton" not in sys.modules:  # Triton's nanobind would report all remaining objects as leaks
        gc.freeze()


def main() -> None:
    """Run the command. Turn expected errors into one clear message and an exit status."""
    # By default, PyTorch's CPU threads spin while they wait for each other. If another process needs the
    # cores, one second of interpreter time can take half a minute. PyTorch reads OMP_WAIT_POLICY at import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Importing PyTorch creates a million lasting objects. Scanning them in every garbage collection would
    # take a third of a short command's time.
    gc.set_threshold(100_000)
    atexit.register(_skip_last_collection)
    try:
        app()  # exits by itself: with OK, a command's own status, or 2 for wrong usage
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            echo("coda-agent: interrupted", err=True)
        raise
    except Exception as error:
        sys.exit(print_error(error))


if __name__ == "__main__":
    main()
