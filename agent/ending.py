"""How a command ends: the report it prints, the words of what went wrong, and its exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from agent import session
from agent.visible import echo

if TYPE_CHECKING:
    from verifier.report import Accepted, Checked, Rejected

OK, REJECTED, USAGE, ABSENT, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def finish(report: Accepted | Checked | Rejected, as_json: bool, run: str = "") -> None:
    """Print a report, and what to do next with ``run``, and leave with its status."""
    from agent import render

    if as_json:
        echo(report.model_dump_json(indent=1))
    else:
        console = session.console(False)
        render.show(console, report)
        if run and report.status == "accepted":
            console.print(f"next: coda-agent review {run}; coda-agent accept {run} --commit")
        if run and report.status == "checked":
            console.print(f"to measure it on an H100 elsewhere: coda-agent bundle {run}")
    raise typer.Exit(REJECTED if report.status == "rejected" else OK)


def explained(error: Exception) -> int:
    """The exit status of an error that has words for the user; any other is our bug and goes on."""
    from agent.accept import AcceptError, KernelError
    from agent.budget import OutOfBudget
    from agent.bundle import BundleError
    from agent.compare.results import ResultsError
    from agent.journal import DamagedError, JournalError
    from agent.optimize import NothingToOptimize
    from agent.primitive import PrimitiveError
    from agent.providers import ProviderError
    from agent.scaffold import ScaffoldError
    from agent.show.counters import CountersError
    from agent.table import TableError
    from agent.tips import TipsError
    from primitives.refusal import CompileError
    from verifier.jail import JailUnavailable
    from verifier.sanitizer import SanitizerMissing
    from verifier.spec_file import SpecError

    wrong = SpecError | KernelError | BundleError | CountersError | PrimitiveError | ScaffoldError | TipsError
    if isinstance(error, wrong | ResultsError | TableError | DamagedError):
        status = USAGE
    elif isinstance(error, AcceptError | CompileError | OutOfBudget):
        status = REJECTED
    elif isinstance(
        error,
        JournalError | NothingToOptimize | ProviderError | JailUnavailable | SanitizerMissing | OSError,
    ):
        status = ABSENT
    else:
        raise error
    echo(f"coda-agent: {error}", err=True)
    return status
