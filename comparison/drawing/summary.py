"""The summary of a comparison. It compares the LLM's kernels with other columns by operator, and the measured
rows with the paper's claims.

A ratio is a column's time over the time of the LLM's kernel; above 1 the LLM's kernel is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, NamedTuple

from coda_agent.agent.reporting.table_rows import (
    GROUPS,
    RMSNORM_BACKWARD,
    SQUARE_WEIGHTS,
    WIDTHS,
    counted,
    in_processes,
    order,
    span,
)
from coda_agent.comparison.competitors import COMPILE, HUMAN, UPSTREAM, composed, helped
from coda_agent.comparison.drawing.cells import Cell, TableRow, current_sessions
from coda_agent.comparison.results import LAYER_BOTH, LAYER_FORWARD, Results
from coda_agent.verifier.baselines.pytorch import CUBLAS
from coda_agent.verifier.statistics import Interval, product

TEN = GROUPS["CODA's ten"]
SWIGLU_BACKWARD = "gemm_swiglu_bwd"
WHOLE = (LAYER_FORWARD, LAYER_BOTH)  # whole layers
FORWARD = tuple(name for name in TEN if name not in (SWIGLU_BACKWARD, RMSNORM_BACKWARD))
RIVALS = (HUMAN, COMPILE, UPSTREAM)  # the columns of the summary, in order
OPERATORS, LAYERS = "all operators", "all layers"
# A decision needs at least this many processes, because the times vary between processes.
FEWEST = 2
ALONE, DOUBTED = "‡", "§"  # marks for a ratio from one process, and for an impossible time
# fraction by which a time may be below the roofline; measured peak rates, and so the roofline, are not exact
BELOW = 0.05
NOTHING = "Nothing has been measured yet."


Outcome = Literal["win", "tie", "loss", "undecided"]
PLURALS = {"win": "s", "tie": "s", "loss": "es", "undecided": ""}
OUTCOMES: tuple[Outcome, ...] = ("win", "tie", "loss", "undecided")


class Kind(NamedTuple):
    """A kind of operators, which are averaged together. ``name`` describes the kind in tables, and ``told``
    describes the kind in sentences."""

    name: str
    told: str


@dataclass(frozen=True)
class Shared:
    """A column with two kinds of human-written kernels. ``own``: the library's own kernels. ``other``:
    kernels that we composed, or that need passes of PyTorch. ``which``: whether an operator's kernel is of
    the other kind. ``drawn``: how a chart describes the other kind."""

    own: Kind
    other: Kind
    which: Callable[[str], bool]
    drawn: str


SHARED = {
    HUMAN: Shared(
        Kind("QuACK's own kernels", "where the kernel is QuACK's own"),
        Kind("composed by us from QuACK's operators", "where we composed the kernel from QuACK's operators"),
        composed,
        "we composed the kernel from QuACK's operators",
    ),
    UPSTREAM: Shared(
        Kind("CODA's own kernels", "where the kernel is CODA's own"),
        Kind("CODA's kernels with passes of PyTorch's", "where CODA's package leaves a part to PyTorch"),
        helped,
        "its kernels leave passes over whole matrices to PyTorch",
    ),
}


@dataclass(frozen=True)
class RowRatio:
    """The ratio of one row, and the number of ``processes`` that measured the ratio. ``doubted``: one of the
    ratio's two times is impossible."""

    case: str
    ratio: Interval
    indirect: bool
    processes: int
    doubted: bool

    @classmethod
    def of(cls, line: TableRow, cell: Cell) -> RowRatio | None:
        """The ratio in a row's cell; None if the cell has no ratio."""
        if cell.against is None:
            return None
        # the LLM's time, computed because its column may not be shown
        own = cell.milliseconds / cell.against.estimate
        doubted = below(line, cell) or own < line.roofline * (1 - BELOW)
        return cls(line.case, cell.against, cell.indirect, cell.processes, doubted)

    @property
    def alone(self) -> bool:
        return self.processes < FEWEST

    @property
    def undecided(self) -> bool:
        return self.alone or self.doubted

    @property
    def outcome(self) -> Outcome:
        """The outcome for the LLM's kernel: a win or a loss if the whole interval is on one side of 1,
        otherwise a tie. A ratio that is doubted or comes from one process is undecided."""
        if self.undecided:
            return "undecided"
        return "win" if self.ratio.low > 1 else "loss" if self.ratio.high < 1 else "tie"


@dataclass(frozen=True)
class Tally:
    """The geometric mean of the ratios of one or more operators' rows."""

    name: str
    rows: tuple[RowRatio, ...]
    operators: tuple[str, ...]

    def __str__(self) -> str:
        *told, last = [
            counted(count, outcome, PLURALS[outcome])
            for outcome in OUTCOMES
            if (count := self.count(outcome)) or outcome != "undecided"
        ]
        of = "whole layers" if self.name == LAYERS else counted(len(self.operators), "operator")
        return (
            f"{', '.join(told)} and {last} in {counted(len(self.rows), 'row')} of {of} "
            f"(geometric mean {self.average})"
        )

    @property
    def mean(self) -> Interval:
        return product([row.ratio for row in self.rows], 1 / len(self.rows))

    @property
    def average(self) -> str:
        """The mean as text. The text has no interval if a row is undecided, because an interval would claim
        too much."""
        marks = doubts(self.rows)
        return f"{self.mean.estimate:.3f} {marks}" if marks else ratio_text(self.mean)

    def count(self, outcome: str) -> int:
        return sum(row.outcome == outcome for row in self.rows)


@dataclass(frozen=True)
class Summary:
    """The LLM's kernels against a column, by operator. The summary is empty if no row has figures for both
    the LLM and the column."""

    column: str
    operators: tuple[Tally, ...]

    @property
    def totals(self) -> tuple[Tally, ...]:
        """The tallies of all operators and of all whole layers, without empty tallies."""
        return self._together({OPERATORS: lambda name: name not in WHOLE, LAYERS: lambda name: name in WHOLE})

    @property
    def kinds(self) -> tuple[Tally, ...]:
        """For a column in ``SHARED``, the tallies of the library's own kernels and of the other kernels,
        without empty tallies."""
        if not (shared := SHARED.get(self.column)):
            return ()
        own, other, which = shared.own.name, shared.other.name, shared.which
        return self._together({own: lambda name: name not in WHOLE and not which(name), other: which})

    def _together(self, kinds: Mapping[str, Callable[[str], bool]]) -> tuple[Tally, ...]:
        every = {kind: [t for t in self.operators if which(t.name)] for kind, which in kinds.items()}
        return tuple(_all(kind, tallies) for kind, tallies in every.items() if tallies)

    def __str__(self) -> str:
        if not self.operators:
            return f"Against {self.column}: no row has both."
        kinds, totals = self.kinds, self.totals
        apart = [total for total in totals if total.name == LAYERS] if kinds else totals
        told = "; ".join([*map(self._of_kind, kinds), *map(str, apart)])
        rule = "A row is a win or a loss only if its whole interval is on one side of 1"
        if marks := doubts(row for total in totals for row in total.rows):
            why = " or ".join(_WHY[mark] for mark in marks)
            rule += f"; it is undecided if {why}, and a mean over such a row has no interval"
        return f"Against {self.column} (wins are the LLM's): {told}. {rule}."

    def _of_kind(self, tally: Tally) -> str:
        """A tally as text, preceded by the kind of operators that the tally counts."""
        shared = SHARED[self.column]
        if tally.name == shared.own.name:
            return f"{shared.own.told}, {tally}"
        return f"{shared.other.told} ({', '.join(tally.operators)}), {tally}"


@dataclass(frozen=True)
class Claim:
    """A published claim: for these operators, the ratio to this column is between ``low`` and ``high``.
    ``cases``: the names of the cases that the claim is about; empty if it is about all cases."""

    what: str
    operators: tuple[str, ...]
    column: str
    low: float
    high: float
    source: str
    cases: tuple[str, ...] = ()


_READERS = "CODA (arXiv 2605.19269), as its readers report it; cuBLAS with torch.compile"
CLAIMS = (
    Claim("forward operators", FORWARD, COMPILE, 1.0, 1.3, _READERS),
    Claim(
        "RMSNorm backward, weights of (d, d): M = 16384, K = N = 2048 and 4096",
        (RMSNORM_BACKWARD,),
        COMPILE,
        1.4,
        1.8,
        f"{_READERS}; its authors' public benchmark has M = N = K = 2048, 4096 and 8192",
        cases=SQUARE_WEIGHTS,
    ),
    Claim("SwiGLU backward", (SWIGLU_BACKWARD,), COMPILE, 1.3, 1.6, _READERS),
    Claim("a whole layer, forward", (LAYER_FORWARD,), COMPILE, 1.05, 1.2, _READERS),
    Claim(
        "kernels written by a model are as fast as those written by people: QuACK's own",
        tuple(name for name in TEN if not composed(name)),
        HUMAN,
        1.0,
        1.0,
        "CODA (arXiv 2605.19269): its abstract says that both achieve high performance; its readers report "
        "parity, and that five of a model's ten kernels needed 300 to 1,000 lines of handwritten visitors",
    ),
)


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with the measured rows that it is about."""

    claim: Claim
    rows: tuple[RowRatio, ...]

    @property
    def measured(self) -> str:
        """The range of the rows' ratios."""
        if not self.rows:
            return "not in these rows"
        ratios = [row.ratio.estimate for row in self.rows]
        return f"{min(ratios):.3f} to {max(ratios):.3f} in {counted(len(ratios), 'row')}"

    @property
    def verdict(self) -> str:
        """The numbers of rows below, within and above the claim, and of undecided rows, as text. A row is
        below or above the claim if the row's whole interval is."""
        claim, decided = self.claim, [row.ratio for row in self.rows if not row.undecided]
        below = sum(ratio.high < claim.low for ratio in decided)
        above = sum(ratio.low > claim.high for ratio in decided)
        counts = {"below": below, "within": len(decided) - below - above, "above": above}
        counts["undecided"] = len(self.rows) - len(decided)
        told = {where: count for where, count in counts.items() if count}
        if len(told) < 2:
            return next(iter(told), "not measured")
        return ", ".join(f"{count} {where}" for where, count in told.items())


def against(lines: Sequence[TableRow], column: str) -> Summary:
    """The summary against this column. The summary covers every operator with a row that has figures for both
    the column and the LLM's kernel."""
    found: dict[str, list[RowRatio]] = {}
    for line in ordered(lines):
        cell = line.cell(column)
        if cell and (row := RowRatio.of(line, cell)):
            found.setdefault(line.operator, []).append(row)
    return Summary(column, tuple(Tally(name, tuple(rows), (name,)) for name, rows in found.items()))


def findings(lines: Sequence[TableRow]) -> list[CheckedClaim]:
    """Every claim, with the measured rows that it is about."""
    rows = {
        column: {tally.name: tally.rows for tally in against(lines, column).operators}
        for column in {claim.column for claim in CLAIMS}
    }
    return [
        CheckedClaim(
            claim,
            tuple(
                row
                for name in claim.operators
                for row in rows[claim.column].get(name, ())
                if not claim.cases or row.case in claim.cases
            ),
        )
        for claim in CLAIMS
    ]


def below(line: TableRow, cell: Cell) -> bool:
    """Whether a time is shorter than the hardware allows. A bare matmul never counts as too short, because it
    does less work than the roofline assumes."""
    return cell.arm != CUBLAS and cell.milliseconds < line.roofline * (1 - BELOW)


def doubts(rows: Iterable[RowRatio]) -> str:
    """The marks for the reasons why rows are undecided."""
    rows = list(rows)
    told = {ALONE: any(row.alone for row in rows), DOUBTED: any(row.doubted for row in rows)}
    return "".join(mark for mark, needed in told.items() if needed)


_WHY = {
    ALONE: f"it comes from one process ({ALONE})",
    DOUBTED: f"one of its times lies over {BELOW:.0%} below the roofline ({DOUBTED})",
}


def ratio_text(ratio: Interval) -> str:
    """A ratio and its interval with three decimals. There are more decimals if the reader could not otherwise
    see whether the interval contains 1."""
    ends = [end for end in (ratio.low, ratio.high) if end != 1]
    places = next(n for n in count(3) if all(round(end, n) != 1 for end in ends))
    return f"{ratio.estimate:.{places}f} [{ratio.low:.{places}f}, {ratio.high:.{places}f}]"


def _all(name: str, tallies: Sequence[Tally]) -> Tally:
    rows = tuple(row for tally in tallies for row in tally.rows)
    return Tally(name, rows, tuple(name for tally in tallies for name in tally.operators))


def ordered(lines: Iterable[TableRow]) -> list[TableRow]:
    """Sort rows as in all tables: unknown operators come last, and within an operator the widths of real
    models come first."""
    widths = {name: place for place, name in enumerate(WIDTHS)}
    lines = list(lines)
    first = {line.operator: place for place, line in reversed(list(enumerate(lines)))}
    return sorted(
        lines,
        key=lambda line: (
            order(line.operator)[0],
            first[line.operator],
            widths.get(line.case, len(widths)),
        ),
    )


def conditions_text(results: Results) -> str:
    """Text about the devices, versions and dates of the results. If sessions differ in a value, the text
    lists all values."""
    sessions = current_sessions(results)
    if not sessions:
        return NOTHING
    conditions = [session.conditions for session in sessions]
    known = {
        "driver": _each(conditions, "driver"),
        "PyTorch": _each(conditions, "torch"),
        "CUDA": _each(conditions, "cuda"),
    }
    parts = [f"{name} {value}" for name, value in known.items() if value] + _versions(conditions)
    days = sorted(session.date[:10] for session in sessions)
    rounds = sorted(len(arm.milliseconds) for session in sessions for arm in session.arms.values())
    processes = [len({s.process for s in sessions if s.row == row}) for row in {s.row for s in sessions}]
    device = " ".join(
        [_each(conditions, "gpu") or "an unknown device", *([f"({', '.join(parts)})"] if parts else [])]
    )
    return (
        f"{counted(len(processes), 'row')} on {device}, {span(days[0], days[-1])}, "
        f"{span(rounds[0], rounds[-1])} rounds in {in_processes(min(processes), max(processes))} a row."
    )


def _each(conditions: Iterable[Mapping[str, Any]], key: str) -> str:
    return " and ".join(sorted({str(c[key]) for c in conditions if c.get(key) is not None}))


def _versions(conditions: Iterable[Mapping[str, Any]]) -> list[str]:
    found: dict[str, set[str]] = {}
    for versions in (c.get("versions") for c in conditions):
        for name, version in versions.items() if isinstance(versions, Mapping) else ():
            found.setdefault(str(name), set()).add(str(version))
    return [f"{name} {' and '.join(sorted(found[name]))}" for name in sorted(found) if name != "torch"]
