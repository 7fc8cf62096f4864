"""The commands that measure checked kernels on another machine: bundle, measure and import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coda_agent.agent import setup
from coda_agent.agent.cli.exit_codes import OK, REJECTED
from coda_agent.agent.cli.sweep import Ray, fleet, spreads
from coda_agent.agent.options import MeasuringOptions, grouped
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.errors import Absent

if TYPE_CHECKING:
    from coda_agent.agent.artifacts.bundle import Bundle, BundleResults
    from coda_agent.agent.reporting.progress import LiveView
    from coda_agent.verifier.gates import Progress
    from coda_agent.verifier.measure import MeasureOptions


def bundle(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs with a checked kernel.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The bundle to write.")] = Path("bundle.json"),
) -> None:
    """Pack checked kernels, to measure on an H100 elsewhere."""
    from coda_agent.agent.artifacts.bundle import pack
    from coda_agent.agent.reporting import progress
    from coda_agent.agent.run.runs import folder

    with progress.LiveView(setup.console(False)) as watch:
        # dict.fromkeys drops runs that were given twice
        made = pack(list(dict.fromkeys(folder(name).name for name in run)), out, watch.gate)
    echo(f"{out}: {len(made.entries)} kernel(s). On the H100: coda-agent measure {out}")


@grouped
def measure(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file from coda-agent bundle.")],
    measuring: MeasuringOptions,
    out: Annotated[Path, typer.Option("--out", "-o", help="The results file to write.")] = Path(
        "results.json"
    ),
    ray: Ray = None,
) -> None:
    """Measure a bundle on this machine's H100s, or on those of a Ray cluster. A second call continues an
    interrupted one."""
    from coda_agent.agent.artifacts import bundle as bundles
    from coda_agent.agent.reporting import progress

    if not path.is_file():
        raise typer.BadParameter(f"{path}: no such file; give a file written by bundle")
    bundle = bundles.read(path)
    bundles.check_free(out, path, bundle)
    if ray is None and not setup.use_gpu(None):
        raise Absent(f"{setup.NO_H100}; copy {path} to a machine with an H100, and measure there")
    with progress.LiveView(setup.console(False)) as watch:
        done = _measured_bundle(path, bundle, out, measuring.options(), watch, ray)
    worst = OK
    for result in done.results:
        status = result.measurement["status"]
        echo(f"{result.run}: {status}" + _why(result.measurement))
        worst = max(worst, OK if status == "measured" else REJECTED)
    echo(f"{out}. Where the runs are: coda-agent import {out}")
    raise typer.Exit(worst)


def _why(measurement: dict[str, Any]) -> str:
    if measurement["status"] == "rejected":
        return f" at {measurement['gate']}: {measurement['message']}"
    return f": {measurement['reason']}" if measurement["status"] == "unmeasured" else ""


def _measured_bundle(
    path: Path, bundle: Bundle, out: Path, options: MeasureOptions, watch: LiveView, ray: str | None
) -> BundleResults:
    if spreads(ray):
        from coda_agent.agent.fleet.bundles import measure as spread

        def heard(name: str) -> Progress:  # several kernels are measured at once, each with its own row
            return lambda gate, words: watch.gate(name, f"{gate} {words}")

        with fleet(ray) as pool:
            return spread(path, bundle, out, options, pool, heard)
    from coda_agent.agent.artifacts import bundle_measuring
    from coda_agent.agent.storage.gpu_lock import gpu_alone

    with gpu_alone(watch.console.print):
        return bundle_measuring.measure(path, bundle, out, options, progress=lambda name: watch.gate)


def import_results(
    path: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results file from coda-agent measure.")],
) -> None:
    """Import measurements from another machine into their runs."""
    from coda_agent.agent.artifacts.bundle import take

    for name, found in take(path):
        if found.status == "measured":
            echo(f"{name}: measured. Look at it: coda-agent review {name}")
        elif found.status == "unmeasured":
            echo(f"{name}: invalid measurement, {found.reason}. Measure again: coda-agent bundle {name}")
        else:
            echo(f"{name}: rejected at {found.gate}: {found.code}. Continue: coda-agent resume {name}")
