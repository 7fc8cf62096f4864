"""Spread a comparison over the GPUs of a fleet; all measurements of a row stay on one GPU.

A piece of work completes one row with ``measuring.measure``, and reports the row's results after every
session. Each session names its GPU. If an incomplete row moves to another GPU, the whole row is measured
again there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from coda_agent.agent.fleet.executor import SlotLost
from coda_agent.agent.fleet.objects import run_shared
from coda_agent.agent.fleet.pieces import STAGE
from coda_agent.agent.fleet.pool import LOSSES, GivenUp, Pool, Suspect
from coda_agent.agent.storage.gpu_lock import gpu_alone
from coda_agent.comparison import measuring
from coda_agent.comparison.measuring import ComparisonRequest, Keep, OutOfTime
from coda_agent.comparison.results import Results, Session
from coda_agent.comparison.rows import Row
from coda_agent.verifier.gates import Failed, Progress
from coda_agent.verifier.worker import Lost, report

UUID = "uuid"  # the key under which a session's conditions hold the GPU's UUID
SILENT = 3600.0  # seconds without a report; arms report each minute, but compiling ahead may take longer


def complete(asked: dict[str, Any]) -> dict[str, Any]:
    """Complete the requested rows on one GPU, as one piece of work. The answer has three keys. ``results``:
    the results. ``ended``: why the time was over early, or "". ``failed``: how the GPU failed, or ""."""
    request: ComparisonRequest = asked["request"]
    results, gpu = Results.model_validate_json(asked["results"]), asked["gpu"]
    with gpu_alone(lambda words: report("compare", words)):
        elsewhere = [s for s in results.sessions if s.conditions.get(UUID, gpu) != gpu]
        if elsewhere and measuring.lacks(request, results):
            results = results.model_copy(update={"sessions": ()})
        before = len(results.sessions)

        def named(made: Results) -> Results:
            new = (_named(session, gpu) for session in made.sessions[before:])
            return made.model_copy(update={"sessions": (*made.sessions[:before], *new)})

        def keep(made: Results) -> None:
            nonlocal results
            results = made
            report(STAGE, named(made).model_dump_json(by_alias=True))

        ended = failed = ""
        try:
            results = measuring.measure(request, results, keep, report)
        except OutOfTime as error:
            ended = str(error)
        except Failed as error:
            failed = str(error)
    made = named(results).model_dump_json(by_alias=True)
    return {"results": made, "ended": ended, "failed": failed}


def _named(session: Session, gpu: str) -> Session:
    return session.model_copy(update={"conditions": {**session.conditions, UUID: gpu}})


def measure(
    asked: ComparisonRequest, results: Results, keep: Keep, progress: Progress, pool: Pool
) -> Results:
    """Measure every missing session on the pool's GPUs, with one row at a time on each GPU. ``keep`` receives
    the results after each session. The time limit begins when the first row may start. If any row ended
    early, raises OutOfTime when all rows have ended. Raises GivenUp if a row fails on two GPUs."""
    spread = _Spread(results, keep, progress, pool)
    if results.machine is None:  # first measure the peak rates on one GPU; all rows use them
        spread.row(replace(asked, rows=()))
    spread.begun = monotonic()
    with pool.threads(len(asked.rows)) as threads:  # one per row, since more GPUs may join later
        for done in [threads.submit(spread.row, replace(asked, rows=(row,))) for row in asked.rows]:
            done.result()
    if spread.ended:
        raise OutOfTime("; ".join(spread.ended))
    return spread.results


class _Spread:
    def __init__(self, results: Results, keep: Keep, progress: Progress, pool: Pool):
        self.results, self.keep, self.progress, self.pool = results, keep, progress, pool
        self.ended: list[str] = []
        self.begun = monotonic()
        self._lock = threading.Lock()

    def row(self, request: ComparisonRequest) -> None:
        """Complete a row on one GPU; if this GPU is lost, measure the row on another GPU."""
        name = " ".join(f"{row.operator} {row.case}" for row in request.rows) or "ceilings"
        label = " ".join(
            row.operator for row in request.rows
        )  # an operator's cases share compiled object files
        for _ in range(LOSSES):
            try:
                with self.pool.lease(True, f"{name} measure") as slot:
                    with self._lock:
                        known = only(self.results, request.rows)
                    left = replace(request, spent=int(monotonic() - self.begun))
                    asked = {"request": left, "results": known.model_dump_json(by_alias=True)}
                    heard = self._heard(request.rows)
                    told = run_shared(
                        self.pool, slot, label, complete, asked | {"gpu": slot.name},
                        patience=SILENT, progress=heard,
                    )  # fmt: skip
                    heard(STAGE, told["results"])
                    if told["failed"]:
                        raise Lost("device_error", told["failed"])
            except (SlotLost, Suspect):
                continue
            if told["ended"]:
                self.ended.append(f"{name}: {told['ended']}")
            return
        raise GivenUp(f"{name}: {LOSSES} GPUs were lost while they ran it; repeat the command to continue")

    def _heard(self, rows: tuple[Row, ...]) -> Callable[[str, str], None]:
        def heard(gate: str, words: str) -> None:
            if gate != STAGE:
                self.progress(gate, words)
                return
            with self._lock:
                self.results = merged(self.results, Results.model_validate_json(words), rows)
                self.keep(self.results)

        return heard


def only(results: Results, rows: tuple[Row, ...]) -> Results:
    """The results with only the sessions of these rows."""
    named = {(row.operator, row.case) for row in rows}
    return results.model_copy(update={"sessions": tuple(s for s in results.sessions if s.row in named)})


def merged(results: Results, part: Results, rows: tuple[Row, ...]) -> Results:
    """Return ``results``, but with these rows as in ``part``."""
    named = {(row.operator, row.case) for row in rows}
    others = tuple(s for s in results.sessions if s.row not in named)
    present, absent = dict(results.present), dict(results.absent)
    for row in rows:
        if latest := part.latest(row.operator, row.case):
            new = {row.case: latest}
            present[row.operator] = present.get(row.operator, {}) | new
            absent[row.operator] = absent.get(row.operator, {}) | part.absent.get(row.operator, {})
    return results.model_copy(
        update={
            "machine": results.machine or part.machine,
            "sessions": (*others, *part.sessions),
            "present": present,
            "absent": absent,
        }
    )
