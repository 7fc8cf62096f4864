"""The options of ``coda-agent compare``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

LAYER = "layer"  # the OPERATOR that selects whole layers, forward only and with backward
PROCESSES, ROUNDS = 3, 40
QUICK_ROUNDS, QUICK_SECONDS = 15, 120.0

Names = list[str] | None


@dataclass(frozen=True)
class Choice:
    """The options that choose rows and columns."""

    only: Annotated[
        Names,
        typer.Option(metavar="OPERATOR", help="Only this operator, or 'layer'. May be repeated."),
    ] = None
    columns: Annotated[
        Names, typer.Option(metavar="COLUMN", help="Only this column (and matmul). May be repeated.")
    ] = None
    cases: Annotated[Names, typer.Option(metavar="CASE", help="Only this case. May be repeated.")] = None
    everything: Annotated[bool, typer.Option("--all", help="All specs and cases, not only CODA's.")] = False

    @property
    def operators(self) -> list[str]:
        """The names that the chosen operators have in results."""
        from coda_agent.comparison.results import LAYER_BOTH, LAYER_FORWARD  # loads pydantic

        both = [LAYER_FORWARD, LAYER_BOTH]
        return [name for given in self.only or () for name in (both if given == LAYER else [given])]


@dataclass(frozen=True)
class Effort:
    """The options for time and repetitions."""

    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Time three rows in one process. Leave out max-autotune, QuACK with our search, and CODA's "
            "own package. Start no session that may end after two minutes, not counting compilation.",
        ),
    ] = False
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=20, help=f"Processes that time a row. Default: {PROCESSES}; with --quick 1."),
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(
            min=12,
            help=f"Limit on interleaved rounds per process. Default: {ROUNDS}; with --quick {QUICK_ROUNDS}.",
        ),
    ] = None
    budget_seconds: Annotated[
        float | None,
        typer.Option(
            min=1, help="Start no session that may end after these seconds. Repeat the command to continue."
        ),
    ] = None
    again: Annotated[bool, typer.Option("--again", help="Retry failed arms.")] = False

    @property
    def limits(self) -> tuple[int, int, float]:
        """The number of processes, the number of rounds in each, and the time limit in seconds."""
        usual = (1, QUICK_ROUNDS, QUICK_SECONDS) if self.quick else (PROCESSES, ROUNDS, math.inf)
        processes, rounds, seconds = usual
        return self.processes or processes, self.rounds or rounds, self.budget_seconds or seconds


@dataclass(frozen=True)
class Drawing:
    """The options that say where results are stored and how they are shown."""

    out: Annotated[
        Path,
        typer.Option(help="Folder of results, tables and charts; existing results are not measured again."),
    ] = Path("comparison-results")
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the ratios into FILE, after <!-- table: comparison -->."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, for other software.")] = (
        False
    )
