"""The tables, notes and sentences that a comparison's pages and the terminal show.

A cell can refer to numbered notes below the tables. A note describes the cell, or says why the cell is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from coda_agent.agent.reporting.charts import number
from coda_agent.comparison.competitors import (
    COLUMNS,
    EAGER,
    LLM,
    MATMUL,
    REFERENCE_ARM,
    ROOFLINE,
    UPSTREAM,
    Column,
)
from coda_agent.comparison.drawing.cells import NAMES, Cell, Empty, TableRow, timed
from coda_agent.comparison.drawing.summary import (
    ALONE,
    BELOW,
    DOUBTED,
    LAYERS,
    OUTCOMES,
    RIVALS,
    WHOLE,
    CheckedClaim,
    RowRatio,
    Summary,
    against,
    below,
    doubts,
    ratio_text,
)
from coda_agent.comparison.results import Results

ABSENT, INDIRECT = "–", "†"
IMPOSSIBLE = f"lies over {BELOW:.0%} below the roofline, which the measured peak rates do not allow"
BESIDE = {REFERENCE_ARM: "cuBLAS's bare matmul", EAGER: "eager PyTorch of the whole layer"}  # reference arms
FIRST_ARMS = {column.name: column.arms[0] for column in COLUMNS}
MEAN = f"geometric mean of time over {LLM}'s [95%]"
SUMMARY = ("operator", MEAN, "rows", "wins", "ties", "losses", "undecided")
CLAIMED = ("claim", "against", "claimed", "measured here", "it lies", "source")
MIB = 2**20
BOLD = (
    f"Bold: the fastest column of a row, by the ratios below. {MATMUL} and {ROOFLINE} do not count, because "
    "they do less work."
)
CLOCKS = (
    f"If a ratio has {INDIRECT}, the two times come from different sessions, in which the GPU's clock rate "
    "may have differed."
)
BOUND = "the least time that bytes and FLOPs allow at this machine's measured peak rates"
VERDICT = (
    f"Ratios are times over {LLM}'s, as above. A row is below or above a claim if its whole interval is, and "
    f"within the claim otherwise. A row from one process, or marked {DOUBTED}, is undecided."
)


@dataclass(frozen=True)
class CellText:
    """The text of a cell. ``best``: whether the cell is the fastest of its row. ``notes``: the numbers of the
    cell's notes."""

    text: str
    best: bool = False
    notes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sheet:
    """A table. ``says`` describes the table's figures. Each row has an operator, a case and one entry per
    column."""

    title: str
    says: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[CellText, ...]], ...]


@dataclass
class Notes:
    """Notes, numbered from 1 in the order of first use."""

    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, *texts: str) -> tuple[int, ...]:
        return tuple(self.numbers.setdefault(text, len(self.numbers) + 1) for text in texts if text)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((place, text) for text, place in self.numbers.items())


def columns_of(found: Sequence[TableRow]) -> tuple[str, ...]:
    """The columns that have cells in these rows."""
    return tuple(name for name in NAMES if any(name in line.cells for line in found))


def rivals(found: Sequence[TableRow]) -> tuple[str, ...]:
    """The summary's columns that have cells in these rows. CODA's own package is included only if it has
    figures, because few machines have the package."""
    there = [name for name in RIVALS if name in columns_of(found)]
    return tuple(name for name in there if name != UPSTREAM or against(found, name).operators)


def sheets(found: Sequence[TableRow]) -> tuple[list[Sheet], Notes]:
    """The tables of these rows, and the notes to which their cells refer."""
    notes, names = Notes(), columns_of(found)
    return [
        _filled(
            "Milliseconds",
            " ".join([BOLD, *clocks(found, names)]),
            found,
            names,
            notes,
            _milliseconds,
            lambda line: f"{number(line.roofline)}",
        ),
        ratios(found, notes),
        _filled(
            "Error against fp64",
            "The RMS error of the worst output, in multiples of the error that every kernel must make. For a "
            "layer: the RMS error of the worst output or gradient against fp32, in multiples of eager "
            "PyTorch's error. Notes name outputs that a column does not compute.",
            found,
            tuple(name for name in names if name != MATMUL),
            notes,
            _error,
        ),
        _filled(
            "Peak memory, MiB",
            "The peak memory of a call, without its inputs.",
            found,
            names,
            notes,
            lambda line, cell: f"{cell.bytes / MIB:,.1f}",
        ),
    ], notes


def ratios(found: Sequence[TableRow], notes: Notes) -> Sheet:
    """The table of each column's time over the time of the LLM's kernel."""
    names = tuple(name for name in columns_of(found) if name != LLM)
    says = f"Ratios of rounds with their 95% intervals: above 1 {LLM}'s kernel is faster."
    return _filled(
        f"Time over {LLM}'s",
        " ".join([says, *marks(found, names)]),
        found,
        names,
        notes,
        _ratio,
        _over_roofline,
    )


def mark(row: RowRatio) -> str:
    """The marks to show after a row's ratio."""
    return (INDIRECT if row.indirect else "") + doubts([row])


def marks(found: Sequence[TableRow], columns: Collection[str]) -> list[str]:
    """The sentences that explain the marks of these columns' ratios."""
    rows = _row_ratios(found, columns)
    beside = dict.fromkeys(
        BESIDE.get(line.reference_arm, "the row's reference arm") for line, row in rows if row.indirect
    )
    told = {
        f"{INDIRECT}: the two were never measured in the same session, so the ratio is computed through "
        f"{' or '.join(beside)}, which is in both sessions; the interval covers both steps.": bool(beside),
        f"{ALONE}: measured in one process, which does not show the variation between processes: neither a "
        "win nor a loss.": any(row.alone for _, row in rows),
        f"{DOUBTED}: one of the two times {IMPOSSIBLE}: neither a win nor a loss.": any(
            row.doubted for _, row in rows
        ),
    }
    return [sentence for sentence, needed in told.items() if needed]


def clocks(found: Sequence[TableRow], columns: Collection[str]) -> list[str]:
    """Return a warning about these columns' times if any ratio of the columns is indirect."""
    return [CLOCKS] if any(row.indirect for _, row in _row_ratios(found, columns)) else []


def _row_ratios(found: Sequence[TableRow], columns: Collection[str]) -> list[tuple[TableRow, RowRatio]]:
    """All ratios of these columns, each with its table row."""
    return [
        (line, row)
        for line in found
        for name in columns
        if (cell := line.cell(name)) and (row := RowRatio.of(line, cell))
    ]


def fastest(line: TableRow) -> str | None:
    """The row's fastest column, by ratio. A column does not count if it computes only a part of the row's
    operator, or if its time is impossible."""

    def slowness(name: str) -> float:
        cell = line.cell(name)
        assert cell is not None
        return cell.against.estimate if cell.against else 1.0 if line.cell(LLM) else cell.milliseconds

    able = [name for name in NAMES if name != MATMUL and (cell := line.cell(name)) and not below(line, cell)]
    return min(able, key=slowness, default=None)


def summed(found: Summary) -> list[tuple[str, ...]]:
    """The rows of the summary under the headings SUMMARY. There is a row for each operator (layers included),
    for each kind of kernels, and for each total."""
    tallies = (*found.operators, *found.kinds, *found.totals)
    return [
        (tally.name, tally.average, f"{len(tally.rows)}", *(f"{tally.count(o)}" for o in OUTCOMES))
        for tally in sorted(tallies, key=lambda tally: tally.name in (*WHOLE, LAYERS))
    ]


def claimed(finding: CheckedClaim) -> tuple[str, ...]:
    """The row of a claim under the headings CLAIMED."""
    claim = finding.claim
    span = f"{claim.low:g} to {claim.high:g}" if claim.low < claim.high else f"{claim.low:g}"
    return claim.what, claim.column, span, finding.measured, finding.verdict, claim.source


def noted(line: TableRow, column: str, cell: Cell) -> tuple[str, ...]:
    """Remarks on a cell: the name of its arm if this is not the column's first arm, the cell's note, and a
    remark if the cell's time is impossible."""
    impossible = f"its time {IMPOSSIBLE}: never a row's fastest, a win or a loss"
    arm = cell.arm if cell.arm != FIRST_ARMS[column] else ""
    return arm, cell.note, impossible if below(line, cell) else ""


def _filled(
    title: str,
    says: str,
    found: Sequence[TableRow],
    columns: tuple[str, ...],
    notes: Notes,
    text: Callable[[TableRow, Cell], str],
    bound: Callable[[TableRow], str] | None = None,
) -> Sheet:
    """Make a sheet. ``text`` computes the text of a cell. ``bound``, if given, computes the text of a last
    column, the roofline."""

    def entry(line: TableRow, column: str) -> CellText:
        cell = line.cells.get(column, Empty("not measured"))
        if isinstance(cell, Empty):
            return CellText(ABSENT, notes=notes.of(cell.reason))
        timed = text is _milliseconds
        numbers = notes.of(*noted(line, column, cell)) if timed or text is _error else ()
        return CellText(text(line, cell), timed and column == fastest(line), numbers)

    rows = tuple(
        (
            line.operator,
            line.case,
            (*(entry(line, column) for column in columns), *([CellText(bound(line))] if bound else [])),
        )
        for line in found
    )
    return Sheet(title, says, (*columns, ROOFLINE) if bound else columns, rows)


def _milliseconds(line: TableRow, cell: Cell) -> str:
    return number(cell.milliseconds)


def _ratio(line: TableRow, cell: Cell) -> str:
    row = RowRatio.of(line, cell)
    return f"{ratio_text(row.ratio)} {mark(row)}".rstrip() if row else ABSENT


def _over_roofline(line: TableRow) -> str:
    own = line.cell(LLM)
    return f"{line.roofline / own.milliseconds:.3f}" if own else ABSENT


def _error(line: TableRow, cell: Cell) -> str:
    return f"{max(loss.yardsticks for loss in cell.losses.values()):.2f}" if cell.losses else ABSENT


def legend(results: Results, names: Collection[str]) -> list[tuple[str, str]]:
    """Each column's name and description."""
    have = timed(results)
    return [(c.name, _explained(c, have)) for c in COLUMNS if c.name in names] + [(ROOFLINE, BOUND)]


def _explained(column: Column, have: Collection[str]) -> str:
    """A column's description. If several of its arms have figures, the description names these arms and the
    default arm."""
    arms = [arm for arm in column.arms if arm in have]
    which = f": the fastest of {'; '.join(arms)} ({column.arms[0]} unless a note names another)"
    return column.what + (which if len(arms) > 1 else "")
