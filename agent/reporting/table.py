"""``coda-agent table``: tables of accepted kernels and recorded runs, as Markdown or data.

``write`` puts the tables into docs/results.md, between the comments ``<!-- table: NAME -->`` and
``<!-- /table -->``, so that nobody copies figures by hand. Times are in milliseconds; intervals have 95%
confidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from coda_agent.agent.reporting.proportions import wilson
from coda_agent.agent.reporting.table_rows import (
    OTHERS,
    WIDTHS,
    MeasuredCase,
    RunRow,
    counted,
    in_processes,
    order,
    rows_of,
    run_row,
    span,
)
from coda_agent.agent.storage import atomic_files, kernel_files
from coda_agent.agent.storage.kernel_files import KERNELS, RECORDINGS
from coda_agent.agent.storage.record import read_recording
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.files import write_atomic
from coda_agent.primitives.system.markdown_table import filled, markdown_table, places
from coda_agent.verifier.baselines.pytorch import CUBLAS
from coda_agent.verifier.report import Accepted

PACKAGES = ("nvidia-cutlass-dsl", "quack-kernels")
TRIES = (1, 3)
HOST_GOAL = 5.0  # a call's host time may exceed that of cuBLAS's bare matmuls by this many microseconds
ELSEWHERE = ("comparison", "headline")  # tables that ``comparison.drawing.markdown`` writes


@dataclass(frozen=True)
class Tables:
    """The reports and rows that the tables show, in the order of the tables."""

    reports: tuple[Accepted, ...]
    rows: tuple[MeasuredCase, ...]
    runs: tuple[RunRow, ...]
    edits: tuple[MeasuredCase, ...] = ()  # rows of kernels whose code an author edited
    superseded: tuple[str, ...] = ()  # operators whose program was measured again after its code was edited

    def of_specs(self) -> tuple[RunRow, ...]:
        """The runs for operators in ``specs/``, without experiments on other functions."""
        return tuple(run for run in self.runs if run.group != OTHERS)

    def to_json(self) -> dict[str, Any]:
        """The rows as data. ``success`` has an entry for each number of tries in ``TRIES``. An entry has the
        number of runs, the number of runs that passed within these tries, and the interval of the success
        rate. ``success_of_specs`` is the same for the runs of ``specs/`` only. If there are no runs to count,
        ``success`` or ``success_of_specs`` is empty."""
        return {
            "measured": [asdict(row) for row in self.rows],
            "edited": [asdict(row) for row in self.edits],
            "superseded": list(self.superseded),
            "authoring": {
                "runs": [asdict(run) for run in self.runs],
                "success": _rates(self.runs),
                "success_of_specs": _rates(self.of_specs()),
            },
        }

    def parts(self) -> dict[str, str]:
        """The Markdown text of each table, by the table's name."""
        return {"measured": _operator_tables(self), "edited": _edited(self), "authoring": _authoring(self)}

    def __str__(self) -> str:
        return "\n".join(self.parts().values())


def success(runs: Iterable[RunRow], tries: int) -> int:
    """The number of runs that passed within ``tries`` tries."""
    return sum(run.passed is not None and run.passed <= tries for run in runs)


def read(kernels: Path = KERNELS, recordings: Path = RECORDINGS) -> Tables:
    """Read the reports of all accepted kernels, and all recorded runs. Raises KernelError and JournalError,
    and OSError if an interrupted acceptance cannot be completed."""
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # if no kernel has been accepted yet
            stack.enter_context(atomic_files.consistent(kernels))
        found = [kernel_files.report(path) for path in sorted(kernels.glob("*.report.json"))]
        exports = [read_recording(path) for path in sorted(recordings.glob("*.jsonl")) if not edited(path)]
    found.sort(key=lambda report: order(report.identity.spec))
    reports = tuple(report for report in found if not report.identity.raw)
    in_force = {report.authorship.run for report in reports if report.authorship}
    runs = [run_row(header, events, in_force) for header, events in exports]
    runs.sort(key=lambda run: (order(run.operator), run.run))
    edits = [report for report in found if report.identity.raw]
    own = {report.identity.spec: report for report in reports}
    superseded = [
        edit.identity.spec
        for edit in edits
        if edit.identity.spec in own and kernel_files.superseded(edit, own[edit.identity.spec])
    ]
    return Tables(reports, rows_of(reports), tuple(runs), rows_of(edits), tuple(superseded))


def edited(path: Path) -> bool:
    """Whether a file belongs to a kernel with edited code, or to the run that edited the code. The name of
    such a file is ``NAME.raw.*``."""
    return ".raw." in path.name


def write(path: Path, tables: Tables) -> None:
    """Write each table between its two comments in a Markdown file. Raises InvalidInput if a comment is
    missing."""
    text = path.read_text(encoding="utf-8")
    for begun in text.split("<!-- table: ")[1:]:
        if "<!-- /table -->" not in begun:
            name = begun.partition(" ")[0]
            raise InvalidInput(f"{path}: <!-- table: {name} --> has no end: put <!-- /table --> after it")
    parts = tables.parts()
    names = [name for name in places(text) if name not in ELSEWHERE]
    if sorted(names) != sorted(parts):
        wanted = ", ".join(f"<!-- table: {name} -->" for name in parts)
        raise InvalidInput(
            f"{path}: has tables {', '.join(names) or 'none'}; mark one place with each of {wanted}, "
            "and the end of each with <!-- /table -->"
        )
    write_atomic(path, filled(text, parts))


def _rates(runs: Sequence[RunRow]) -> dict[str, dict[str, Any]]:
    total, passed = len(runs), {k: success(runs, k) for k in TRIES if runs}
    return {str(k): {"runs": total, "passed": n, "interval": wilson(n, total)} for k, n in passed.items()}


def _operator_tables(tables: Tables) -> str:
    if not tables.reports:
        return "No kernel has been measured yet.\n"
    return "\n".join([_provenance(tables.reports), *_grouped(tables.rows), _host(tables.reports)])


def _provenance(reports: Sequence[Accepted]) -> str:
    """A line that says what was measured, on which devices, and when. If the reports differ in an item, for
    example in the GPU, the line lists all values of the item."""

    def each(records: Iterable[dict[str, Any]], key: str) -> str:
        return " and ".join(sorted({str(record.get(key, "unknown")) for record in records}))

    conditions = [report.conditions for report in reports]
    versions = [f"{name} {each((r.identity.versions for r in reports), name)}" for name in PACKAGES]
    days = sorted(report.date[:10] for report in reports)
    every = [timing for report in reports for timing in report.timings]
    rounds, processes = sorted(t.rounds for t in every), sorted(t.processes for t in every)
    return (
        f"{counted(len(reports), 'operator')} on {each(conditions, 'gpu')} "
        f"(driver {each(conditions, 'driver')}, PyTorch {each(conditions, 'torch')}, {', '.join(versions)}), "
        f"{span(days[0], days[-1])}, {span(rounds[0], rounds[-1])} rounds "
        f"in {in_processes(processes[0], processes[-1])}.\n"
    )


_COLUMNS: dict[str, Callable[[MeasuredCase], object]] = {
    "case": lambda row: row.case,
    "ms": lambda row: f"{row.milliseconds:.3f}",
    "`torch.compile`": lambda row: row.speedup,
    "max-autotune": lambda row: row.autotune,
    "QuACK": lambda row: row.quack,
    "over cuBLAS": lambda row: row.over_cublas,
    "roofline": lambda row: f"{row.roofline:.0%}",
}


_EDITED: dict[str, Callable[[MeasuredCase], object]] = {
    name: _COLUMNS.get(name, lambda row: row.before)
    for name in ("case", "ms", "the kernel before", "`torch.compile`", "over cuBLAS", "roofline")
}


def _edited(tables: Tables) -> str:
    if not tables.edits:
        return "No edit is accepted at present.\n"
    table = _by_operator(tables.edits, _EDITED)
    if not tables.superseded:
        return table
    names = ", ".join(f"`{name}`" for name in tables.superseded)
    return (
        f"{table}\nThe programs of {names} were measured again after their edits, and may now be faster than "
        "the edits. `coda-agent optimize NAME --provider replay` measures an edit against the current "
        "program.\n"
    )


def _grouped(rows: Sequence[MeasuredCase]) -> Iterable[str]:
    """One table per group, under the group's name. All tables have the same columns. A column without any
    figures is left out of all tables."""
    columns = {name: get for name, get in _COLUMNS.items() if any(get(row) is not None for row in rows)}
    for group, members in groupby(rows, key=lambda row: row.group):
        yield f"**{group}**\n\n{_by_operator(members, columns)}"


def _by_operator(
    rows: Iterable[MeasuredCase], columns: Mapping[str, Callable[[MeasuredCase], object]]
) -> str:
    """A table with one line per row; only the first line of each operator names the operator."""
    lines: list[list[object]] = []
    last = ""
    for row in rows:
        name = f"`{row.operator}`" if row.operator != last else ""
        lines.append([name, *(get(row) for get in columns.values())])
        last = row.operator
    return markdown_table(["operator", *columns], lines)


def _host(reports: Sequence[Accepted]) -> str:
    """A line that compares the host time of a call with ``HOST_GOAL``, for the case with the smallest model
    width, ``WIDTHS[0]``. "" if no report has host times for this case."""
    calls = {
        report.identity.spec: timing.host_microseconds
        for report in reports
        for timing in report.timings
        if timing.case == WIDTHS[0] and {"candidate", CUBLAS} <= timing.host_microseconds.keys()
    }
    if not calls:
        return ""
    ours, bare = (
        span(f"{min(times):.1f}", f"{max(times):.1f}")
        for times in ([host[arm] for host in calls.values()] for arm in ("candidate", CUBLAS))
    )
    missed = [
        f"`{name}` ({host['candidate']:.1f} against {host[CUBLAS]:.1f})"
        for name, host in calls.items()
        if host["candidate"] > host[CUBLAS] + HOST_GOAL
    ]
    verdict = f"missed by {', '.join(missed)}" if missed else "met by all"
    return (
        f"Host time of one call at {WIDTHS[0]}, with an idle GPU: {ours} us; of cuBLAS's bare matmuls: "
        f"{bare} us. The goal of at most {HOST_GOAL:.0f} us more than cuBLAS is {verdict}.\n"
    )


def _authoring(tables: Tables) -> str:
    if not tables.runs:
        return "No run has been recorded yet.\n"
    titles = [
        "operator",
        "author",
        "drafts",
        "answers",
        "passed at",
        "tokens read",
        "written",
        "tips",
        "kernel",
    ]
    lines: list[list[object]] = []
    for run in tables.runs:
        kernel = "accepted" if run.accepted else "checked" if run.passed else "none"
        read, written = f"{run.prompt_tokens:,}", f"{run.answer_tokens:,}"
        who = [f"`{run.operator}`", run.author, run.drafts, run.answers, run.passed]
        lines.append([*who, read, written, run.tips, kernel])
    return "\n".join([markdown_table(titles, lines), *(_rate(tables, k) for k in TRIES)])


def _rate(tables: Tables, tries: int) -> str:
    """A line on the success rate within ``tries`` tries, for the runs of ``specs/`` and for all runs."""
    within = "at the first try" if tries == 1 else f"within {tries} tries"
    of_specs = tables.of_specs()
    specs = f"{_share(of_specs, tries)} of specs in `specs/`; " if of_specs else ""
    return f"Passed {within}: {specs}{_share(tables.runs, tries)} in all.\n"


def _share(runs: Sequence[RunRow], tries: int) -> str:
    passed, total = success(runs, tries), len(runs)
    low, high = wilson(passed, total)
    return f"{passed} of {counted(total, 'run')}, {passed / total:.0%} [{low:.1%}, {high:.1%}],"
