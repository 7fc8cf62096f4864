"""The comparison's table. A cell shows the fastest arm (implementation) of its column, or says why the column
has no figure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import truediv
from statistics import fmean, median
from typing import NamedTuple

from coda_agent.comparison.competitors import COLUMNS, LLM
from coda_agent.comparison.results import GONE, Loss, Present, Results, Session
from coda_agent.verifier import statistics
from coda_agent.verifier.decision import central
from coda_agent.verifier.statistics import Interval

NAMES = tuple(column.name for column in COLUMNS)
CHANGED = "has changed since it was measured: coda-agent compare measures it again"


@dataclass(frozen=True)
class Cell:
    """A column's fastest arm in a row.

    ``against``: the arm's time over the time of the LLM's kernel; above 1 the LLM's kernel is faster. The
    ratio is None if the row has no kernel of the LLM, and in the cell of the LLM's kernel itself.
    ``indirect``: the two arms never shared a session, so the ratio is computed through the reference arm.
    ``processes``: the number of processes that measured the ratio, or the time if there is no ratio. An
    indirect ratio is the product of two ratios; then ``processes`` counts those of the ratio that fewer
    processes measured.
    """

    arm: str
    milliseconds: float
    against: Interval | None
    indirect: bool
    losses: Mapping[str, Loss]
    bytes: int
    note: str
    processes: int


@dataclass(frozen=True)
class Empty:
    """A cell without a figure, with the reason."""

    reason: str


@dataclass(frozen=True)
class TableRow:
    """A row of the table. ``roofline`` is the smallest time that the hardware allows, in milliseconds;
    ``reference_arm`` is the arm through which indirect ratios are computed."""

    operator: str
    case: str
    sizes: Mapping[str, int]
    roofline: float
    reference_arm: str
    cells: Mapping[str, Cell | Empty]  # by column name; only columns to show

    def cell(self, column: str) -> Cell | None:
        found = self.cells.get(column)
        return found if isinstance(found, Cell) else None


def lines(results: Results, columns: Collection[str] = NAMES) -> list[TableRow]:
    """One table row per measured row, with the cells of these columns."""
    return [_line(results, operator, case, columns) for operator, case in results.rows()]


def current_sessions(results: Results) -> list[Session]:
    """The sessions from which the cells come. A session is left out if all its arms have changed since."""
    return [session for name in results.rows() for session in _row(results, *name).standing()]


def timed(results: Results) -> set[str]:
    """The arms that have current figures in any row."""
    return {arm for name in results.rows() for arm in _row(results, *name).keys}


def _line(results: Results, operator: str, case: str, columns: Collection[str]) -> TableRow:
    row = _row(results, operator, case)
    absent = results.absent.get(operator, {})
    best = {
        column.name: min((arm for arm in column.arms if arm in row.keys), key=row.slowness, default=None)
        for column in COLUMNS
    }
    cells: dict[str, Cell | Empty] = {}
    for column in (c for c in COLUMNS if c.name in columns):
        if arm := best[column.name]:
            cell = row.cell(arm, None if column.name == LLM else best[LLM])
            cells[column.name] = _with_other_kernel(cell, row, column.arms) if column.name == LLM else cell
        else:
            failed = [f"{a}: {row.failed[a]}" for a in column.arms if a in row.failed]
            known = [absent[a] for a in column.arms if a in absent]
            cells[column.name] = Empty("; ".join(failed or dict.fromkeys(known)) or "not measured")
    return TableRow(operator, case, row.last.sizes, row.last.roofline, row.reference_arm, cells)


def _with_other_kernel(cell: Cell, row: _Row, arms: Collection[str]) -> Cell:
    """Add to a cell's note the time of the model's other kernel (the program or the edited code)."""
    others = [row.cell(arm, None) for arm in arms if arm in row.keys and arm != cell.arm]
    times = [f"{other.arm}: {other.milliseconds:.4g} ms" for other in others]
    return replace(cell, note="; ".join(filter(None, (cell.note, *times))))


def _row(results: Results, operator: str, case: str) -> _Row:
    return _Row(results.of(operator, case), results.latest(operator, case))


class _Ratio(NamedTuple):
    """A ratio of two arms' times, and the ``processes`` that measured it. An ``indirect`` ratio is the
    product of two ratios, and ``processes`` are those of the ratio that fewer processes measured."""

    interval: Interval
    processes: frozenset[int]
    indirect: bool = False


class _Row:
    """The sessions of one row, without outdated figures. A session records the row's definition
    (``question``), the row's reference arm, and a version of each arm (``key``). A session's figures are
    outdated if the last session has another question, another reference arm or another version of the
    reference arm. An arm's figure is also outdated if a later session has another version of the arm.
    ``present`` has the question and the versions at the last request, and counts like one more session."""

    def __init__(self, sessions: list[Session], present: Present | None):
        self.last = sessions[-1]
        sessions = [s for s in sessions if s.question == self.last.question]
        self.reference_arm = self.last.reference_arm
        timed = [s for s in sessions if s.arms]
        if timed:
            now = timed[-1].arms[self.reference_arm].key
            timed = [
                s
                for s in timed
                if s.reference_arm == self.reference_arm and s.arms[s.reference_arm].key == now
            ]
        self.timed = timed
        self.sessions = sessions
        self.keys: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        for session in sessions:
            for arm, failure in session.failed.items():
                if self.keys.get(arm) != failure.key:  # if the keys are equal, another process has figures
                    self.keys.pop(arm, None)
                    self.failed[arm] = failure.reason
            for arm, found in session.arms.items() if session in timed else ():
                self.keys[arm] = found.key
                self.failed.pop(arm, None)
        if present:
            for arm in self._outdated(present):
                self.keys.pop(arm)
                if present.keys.get(arm) != GONE:
                    self.failed[arm] = CHANGED

    def _outdated(self, present: Present) -> set[str]:
        """The arms that have changed since they were measured. If the question or the reference arm has
        changed, all arms count as changed. The result never contains the reference arm itself, because
        indirect ratios need it."""
        found = {arm for arm, key in self.keys.items() if present.keys.get(arm, key) != key}
        if present.question != self.last.question or self.reference_arm in found:
            found = set(self.keys)
        return found - {self.reference_arm}

    def standing(self) -> list[Session]:
        """Return the timed sessions that contain a current arm other than the reference arm, or that timed
        only the reference arm. If no session qualifies, return all timed sessions."""
        found = [
            s
            for s in self.timed
            if len(s.arms) == 1
            or any(
                self.keys.get(name) == arm.key for name, arm in s.arms.items() if name != self.reference_arm
            )
        ]
        return found or self.timed

    def slowness(self, arm: str) -> float:
        """The logarithm of the arm's time over the reference arm's time, averaged over sessions."""
        return fmean(
            median(
                map(math.log, map(truediv, s.arms[arm].milliseconds, s.arms[self.reference_arm].milliseconds))
            )
            for s in self._with(arm)
        )

    def cell(self, arm: str, rival: str | None) -> Cell:
        shared = self._with(arm)
        own = [s.arms[arm] for s in shared]
        ratio = self.ratio(arm, rival) if rival else None
        worst = {
            name: max((a.losses[name] for a in own if name in a.losses), key=lambda lost: lost.yardsticks)
            for name in own[-1].losses
        }
        return Cell(
            arm=arm,
            milliseconds=central([found.milliseconds for found in own]),
            against=ratio.interval if ratio else None,
            indirect=ratio is not None and ratio.indirect,
            losses=worst,
            bytes=max(found.bytes for found in own),
            note="; ".join(filter(None, (own[-1].note, self._failing(arm)))),
            processes=len(ratio.processes if ratio else _processes(shared)),
        )

    def _failing(self, arm: str) -> str:
        """Why an arm that was timed in some processes failed in another process; empty if the arm never
        failed."""
        timed = {s.process for s in self._with(arm)}
        reasons = [
            s.failed[arm].reason
            for s in self.sessions
            if arm in s.failed and s.failed[arm].key == self.keys[arm] and s.process not in timed
        ]
        return f"failed in another process: {reasons[-1]}" if reasons else ""

    def _with(self, *arms: str) -> list[Session]:
        """The sessions in which all of these arms have current figures."""
        return [s for s in self.timed if all(a in s.arms and s.arms[a].key == self.keys[a] for a in arms)]

    def ratio(self, arm: str, rival: str) -> _Ratio:
        """The ratio of the two arms' times, through the reference arm if they never shared a session."""
        together = self._with(arm, rival)
        if together:
            pairs = [(s.arms[arm].milliseconds, s.arms[rival].milliseconds) for s in together]
            return _Ratio(statistics.of_pairs(pairs), _processes(together))
        to, back = self.ratio(arm, self.reference_arm), self.ratio(self.reference_arm, rival)
        fewer = min(to.processes, back.processes, key=len)
        return _Ratio(statistics.product((to.interval, back.interval)), fewer, indirect=True)


def _processes(sessions: list[Session]) -> frozenset[int]:
    """The numbers of these sessions' processes. Several sessions of a row may have the same number, because
    some arms may have run in a separate session or again."""
    return frozenset(s.process for s in sessions)
