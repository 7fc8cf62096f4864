"""Compare the strategy, budget, outcome, cost, times and rounds of several runs, side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from coda_agent.agent.reporting import html_report, pages
from coda_agent.agent.reporting.charts import number
from coda_agent.agent.reporting.render import interval
from coda_agent.agent.reporting.rounds import HEADINGS, cells, rounds
from coda_agent.agent.run import run_summary
from coda_agent.agent.run.history import dollars
from coda_agent.agent.run.run_summary import Account, Attempt
from coda_agent.agent.run.runs import JOURNAL, folder, names
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import JournalError
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.decision import BASELINE
from coda_agent.verifier.report import CANDIDATE


def members(given: Sequence[str]) -> list[str]:
    """Return the names of the runs to compare, without duplicates. A single name stands for its whole group
    of candidates (runs of one spec that were started together). Raises JournalError."""
    found = list(dict.fromkeys(folder(name).name for name in given))
    if len(found) > 1:
        return found
    group = _group(found[0])
    return [name for name in names() if _group(name) == group] or found


def _group(name: str) -> str:
    """The name of a run's group of candidates, which is the name of the group's first run. A run that was
    started alone is a group by itself."""
    try:
        header, _ = record.glance(folder(name) / JOURNAL)
    except JournalError:
        return name
    return str(header.get("group", name))


def write(given: Sequence[str], out: Path | None = None) -> list[Path]:
    """Write the page of each run and, for several runs, a page that compares them. Return the paths, with the
    comparison first.

    For one name, ``out`` is the path of that run's page. For several names, ``out`` is the path of the
    comparison. All other pages go into the folder of ``out``. Without ``out``, each run's page is RUN.html in
    the run's folder, and the comparison is in the first run's folder.

    Raises JournalError and OSError.
    """
    found = members(given)
    if len(found) == 1:
        return [html_report.write(found[0], out)]
    pages = {
        name: out.parent / f"{name}.html" if out else html_report.default_path(folder(name)) for name in found
    }
    path = pages[found[0]].with_name(f"{found[0]}.compared.html")
    if out and len(given) == 1:
        pages[folder(given[0]).name] = out
    elif out in pages.values():
        raise JournalError(f"{out}: this is the page of one of the runs; choose another file")
    elif out:
        path = out
    links = {name: os.path.relpath(own, path.parent) for name, own in pages.items()}
    write_atomic(path, _page([run_summary.read(folder(name)) for name in found], links))
    return [path, *(html_report.write(name, own) for name, own in pages.items())]


def as_dict(given: Sequence[str]) -> dict[str, Any]:
    """The comparison as data, for other software."""
    return {"runs": [_run_fields(run_summary.read(folder(name))) for name in members(given)]}


def _run_fields(run: Account) -> dict[str, Any]:
    header, past, best = run.header, run.past, _best(run)
    strategy = {
        key: header.get(key) for key in ("candidate", "candidates", "attempts", "improve", "provider")
    }
    return {
        "run": past.run,
        "spec": past.spec,
        "strategy": strategy | {"author": past.author},
        "budget": dict(header.get("limits", {})),
        "status": past.status,
        "why": past.why,
        "stopped": past.stopped,
        "attempts": past.attempts,
        "spent": asdict(past.spent),
        "accepted": past.status == "accepted",
        "cases": {
            t.case: {
                "milliseconds": t.milliseconds[CANDIDATE],
                "roofline_milliseconds": t.roofline_milliseconds,
                "speedup": t.ratios[BASELINE].model_dump(),
            }
            for t in (best.timings if best else ())
        },
        "rounds": [
            {
                "attempt": round.attempt.number,
                "kind": round.kind,
                "status": round.attempt.status,
                "spent": asdict(round.spent),
                "gain": {case: ratio.model_dump() for case, ratio in round.gain.items()},
            }
            for round in rounds(run)
        ],
    }


def _page(runs: Sequence[Account], links: Mapping[str, str]) -> str:
    return pages.page(
        "compared.html",
        title=f"{len(runs)} runs of {', '.join(dict.fromkeys(run.past.spec for run in runs))}",
        runs=[_run(run, quote(links[run.past.run])) for run in runs],
        baseline=BASELINE,
        times=_times(runs),
        round_headings=("run", *HEADINGS),
        rounds=[(run.past.run, *cells(round)) for run in runs for round in rounds(run)],
    )


def _run(run: Account, link: str) -> tuple[str, ...]:
    past = run.past
    stopped = f", stopped: {past.stopped}" if past.stopped else ""
    return (
        pages.macro("link", past.run, link),
        _strategy(run.header),
        past.author,
        html_report.budget(run.header),
        pages.macro("status", past.status, f"{past.why}{stopped}"),
        str(past.attempts),
        f"{past.spent.tokens:,}" if past.spent.tokens else "not counted",
        dollars(past.spent),
        f"{past.spent.gpu_seconds:.0f}" if past.spent.gpu_seconds else "–",
    )


def _strategy(header: Mapping[str, Any]) -> str:
    """A run's strategy as text: its place among the candidates, its attempts and its improvement rounds."""
    place = f"{header['candidate']} of {header['candidates']} candidates, " if "candidates" in header else ""
    return f"{place}{header.get('attempts', 1)} attempts, {header.get('improve', 0)} improvement rounds"


def _times(runs: Sequence[Account]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        best = _best(run)
        aside = "" if run.past.status == "accepted" else " (not accepted)"
        for t in best.timings if best else ():
            own, ratio = t.milliseconds[CANDIDATE], t.ratios[BASELINE]
            share = f"{t.roofline_milliseconds / own:.0%}"
            rows.append((f"{run.past.run}{aside}", t.case, number(own), interval(ratio), share))
    return rows


def _best(run: Account) -> Attempt | None:
    """The best attempt of a run: the last accepted attempt, or else the fastest measured attempt; None if no
    attempt was measured."""
    accepted = [attempt for attempt in run.attempts if attempt.status == "accepted"]
    measured = [attempt for attempt in run.attempts if attempt.timings]
    return accepted[-1] if accepted else max(measured, key=_least, default=None)


def _least(attempt: Attempt) -> float:
    """An attempt's smallest speedup over the baseline. The smallest counts, because every case must reach the
    spec's threshold."""
    return min(t.ratios[BASELINE].estimate for t in attempt.timings)
