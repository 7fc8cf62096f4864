"""End a command: print its report or error, and exit with the matching status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from coda_agent.agent import extras, setup
from coda_agent.agent.terminal.safe_text import echo
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.verifier.report import Report

OK, REJECTED, USAGE, ABSENT, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 4, 130


def finish(report: Report, as_json: bool, run: str = "") -> None:
    """Print a report and the next command for ``run``, then exit: with status 1 if the kernel was rejected,
    otherwise with 0."""
    from coda_agent.agent.reporting import render

    if as_json:
        echo(report.model_dump_json(indent=1))
    else:
        console = setup.console(False)
        render.show(console, report)
        if run and report.status == "accepted":
            console.print(f"next: coda-agent review {run}; coda-agent accept {run} --commit")
        if run and report.status == "checked":
            console.print(f"to measure it on an H100 elsewhere: coda-agent bundle {run}")
    raise typer.Exit(REJECTED if report.status == "rejected" else OK)


def print_error(error: Exception) -> int:
    """Print an expected error's message and return its exit status. Any other error is a bug and is raised
    again."""
    if isinstance(error, CodaError):
        status = error.exit_status
    elif isinstance(error, OSError):
        status = ABSENT
    elif isinstance(error, ModuleNotFoundError) and (remedy := extras.remedy(error)):
        error, status = ImportError(f"the package {error.name!r} is not installed: {remedy}"), ABSENT
    else:
        raise error
    echo(f"coda-agent: {error}", err=True)
    return status
