"""``coda-agent report``: render a run as one HTML page, without scripts, network access or other files.

A journal contains text that models or other people wrote, so ``pages`` escapes all text.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from coda_agent.agent.prompts.markdown_fences import PYTHON, blocks
from coda_agent.agent.providers import Turn, Usage
from coda_agent.agent.reporting import pages
from coda_agent.agent.reporting.charts import Mark, bars, duration, number, timeline, unavailable
from coda_agent.agent.reporting.render import figures, interval, not_run, rivals
from coda_agent.agent.reporting.rounds import HEADINGS, cells, rounds
from coda_agent.agent.run.run_summary import KINDS, Account, Attempt, Step, read
from coda_agent.agent.run.runs import folder
from coda_agent.agent.run.view import Judged
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.report import Accepted, Checked, Rejected, Report, Timing


def write(name: str, out: Path | None = None) -> Path:
    """Write the page of a run to ``out``, by default RUN.html in the run's folder. Return the page's path.
    The run may be unfinished.

    Raises JournalError if the run is missing, or if another version of coda-agent wrote the run's journal.
    Raises OSError if a file cannot be read or written.
    """
    directory = folder(name)
    path = out or default_path(directory)
    write_atomic(path, page(read(directory)))
    return path


def default_path(directory: Path) -> Path:
    """The default path of a run's page, in the run's folder."""
    return directory / f"{directory.name}.html"


def page(run: Account) -> str:
    """The page of a run as HTML."""
    shown: list[dict[str, Any]] = []
    before: Attempt | None = None
    for attempt in run.attempts:
        shown.append(_attempt(attempt, before))
        before = attempt if attempt.source else before
    marks, missing = [_mark(step) for step in run.steps], unavailable()
    title = f"Timeline of {len(marks)} events in {_total(run)}"
    events = [(s.event.key, s.event.kind, _moment(s.event.time), duration(s.seconds)) for s in run.steps]
    return pages.page(
        "run.html",
        title=f"{run.past.run}: {run.past.status}",
        run=run.past.run,
        head=_head(run).items(),
        events=events,
        timeline=timeline(title, marks) if marks and not missing else "",
        missing=missing,
        round_headings=HEADINGS,
        rounds=[cells(round) for round in rounds(run)],
        attempts=shown,
        edited=run.edited,
        spec=run.spec,
    )


def _head(run: Account) -> dict[str, str]:
    past, header = run.past, run.header
    replayed = f", of run {header['replays']}" if header.get("replays") else ""
    made = len(run.attempts)
    # ``resume`` may have allowed more attempts than the header
    limit = f" of at most {header['attempts']}" if header.get("attempts", 0) >= made else ""
    limit += f" and {header['improve']} to improve it" if header.get("improve") else ""
    pairs = {
        "spec": past.spec,
        "status": pages.macro("status", past.status, past.why),
        "provider": f"{header.get('provider', 'unknown')}{replayed}",
        "author": past.author,
        "attempts": f"{made}{limit}",
        "tokens": _tokens(past.usage),
        "spent": str(past.spent),
        "budget": budget(header),
        "started": _moment(past.started),
        "last event": _moment(past.ended),
        "from the first event to the last": _total(run),
    }
    if past.stopped:
        pairs["stopped"] = past.stopped
    if "candidates" in header:
        pairs["candidate"] = f"{header['candidate']} of {header['candidates']}"
    return pairs


def budget(header: Mapping[str, Any]) -> str:
    """A text about a run's budget."""
    limits = header.get("limits", {}).items()
    return ", ".join(f"{value:,.15g} {name.replace('_', ' ')}" for name, value in limits) or "none"


def _tokens(usage: Usage) -> str:
    if usage == Usage():
        return "not counted"
    return (
        f"{usage.input_tokens:,} in, {usage.cache_read_tokens:,} read from the cache, "
        f"{usage.cache_write_tokens:,} written to it, {usage.output_tokens:,} out"
    )


def _moment(time: str) -> str:
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M:%S} UTC" if time else "nothing yet"


def _mark(step: Step) -> Mark:
    row = f"attempt {step.attempt}" if step.attempt else "run"
    kind = step.event.kind if step.event.kind in KINDS else "other"
    return Mark(row, kind, step.seconds)


def _total(run: Account) -> str:
    return duration(sum(step.seconds for step in run.steps))


def _attempt(attempt: Attempt, before: Attempt | None) -> dict[str, Any]:
    report = attempt.report
    return {
        "number": attempt.number,
        "status": attempt.status,
        "tokens": _tokens(sum((turn.usage for turn in attempt.turns), Usage())),
        "drafts": [_draft(draft) for draft in attempt.drafts],
        "source": attempt.source,
        "before": before.number if before else None,
        "diff": _diff(before, attempt) if before else [],
        "turns": [(turn.author, _prose(turn)) for turn in attempt.turns],
        "verdict": _verdict(report, attempt.source) if report else None,
        "voids": attempt.voids,
        "measured": _case_charts(attempt.number, attempt.timings) if attempt.timings else None,
        "conditions": _conditions(report) if isinstance(report, Accepted) else None,
    }


def _draft(draft: Judged) -> dict[str, Any]:
    report = draft.report
    why = f" at {report.gate}: {report.code}" if isinstance(report, Rejected) else ""
    return {
        "outcome": f"{report.status}{why}",
        "source": draft.source,
        "verdict": _verdict(report, draft.source),
    }


def _diff(before: Attempt, after: Attempt) -> list[tuple[str, str]]:
    """A unified diff, as pairs of CSS class and line."""
    old, new = (a.source.rstrip("\n").split("\n") for a in (before, after))
    lines = list(difflib.unified_diff(old, new, lineterm=""))[2:]  # skip the two lines with file names
    css = {"+": "add", "-": "del", "@": "hunk", " ": "same"}
    return [(css[line[0]], line) for line in lines]


def _prose(turn: Turn) -> str:
    """An answer's text; "[the source]" replaces the last block of code."""
    *_, block = [None, *blocks(turn.text, *PYTHON)]
    words = turn.text
    if block:
        words = f"{words[: block.start()]}[the source]\n{words[block.end() :]}"
    return words.strip()


def _verdict(report: Report, source: str) -> dict[str, Any]:
    found: dict[str, Any] = {"gates": _gates(report), "unmeasured": None, "message": None, "evidence": None}
    if isinstance(report, Checked):
        found["unmeasured"] = report.unmeasured
    if isinstance(report, Rejected):
        lines = dict(enumerate(source.split("\n"), 1))
        found |= {"message": report.message, "line": report.line}
        found["text"] = lines.get(report.line, "").strip() if report.line is not None else ""
        evidence = {key: value for key, value in report.evidence.items() if key != "timings"}
        found["evidence"] = json.dumps(evidence, indent=1) if evidence else None
    return found


def _gates(report: Report) -> list[tuple[str, str, str, str]]:
    passed = pages.macro("span", "passed", "passed")
    rows: list[tuple[str, str, str, str]] = [
        (g.gate, passed, f"{g.seconds:.2f}", "\n".join([figures(g), *g.findings])) for g in report.gates
    ]
    if isinstance(report, Rejected):
        rows.append((report.gate, pages.macro("span", "rejected", "rejected"), "", report.code))
    if isinstance(report, Checked):
        rows += [(name, pages.macro("span", "not run", "dim"), "", "") for name in not_run(report)]
    return rows


def _case_charts(attempt: int, timings: Sequence[Timing]) -> dict[str, Any]:
    charts = []
    for index, t in enumerate(() if unavailable() else timings):
        sizes = ", ".join(f"{dim} {size}" for dim, size in t.sizes.items())
        title = f"Case {t.case}: milliseconds of each arm ({sizes})"
        name = f"attempt{attempt}-case{index}"
        charts.append((title, bars(name, title, t.milliseconds, t.roofline_milliseconds)))
    arms = list(dict.fromkeys(arm for t in timings for arm in t.ratios))
    return {
        "charts": charts,
        "arms": ["case", *arms],
        "ratios": [(t.case, *(interval(t.ratios.get(arm)) for arm in arms)) for t in timings],
        "costs": list(map(_cost, timings)),
        "rivals": rivals(tuple(timings)),
    }


def _cost(t: Timing) -> tuple[str, ...]:
    return (
        t.case,
        number(t.milliseconds["candidate"]),
        number(t.graph_milliseconds) if t.graph_milliseconds else "",
        number(t.roofline_milliseconds),
        number(t.host_microseconds["candidate"]),
        f"{t.tuning_seconds:.1f}",
        "\n".join(f"step {step}: {_cell(schedule)}" for step, schedule in t.schedules.items()),
    )


def _conditions(report: Accepted) -> dict[str, Any]:
    plain = {name: value for name, value in report.conditions.items() if not isinstance(value, Mapping)}
    records = []
    for name in sorted(report.conditions.keys() - plain.keys()):
        found = report.conditions[name].items()
        rows = {key: row if isinstance(row, Mapping) else {"": row} for key, row in found}
        records.append((name, *_records(rows)))
    controls = {str(number): row for number, row in enumerate(report.controls, 1)}
    return {
        "facts": [(name, _cell(value)) for name, value in ({"measured": report.date} | plain).items()],
        "versions": list(report.identity.versions.items()),
        "records": records,
        "controls": _records(controls) if controls else None,
    }


def _records(records: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a table of records, which may have different fields."""
    fields = list(dict.fromkeys(field for row in records.values() for field in row))
    rows = [[name, *(_cell(row.get(field, "")) for field in fields)] for name, row in records.items()]
    return ["", *fields], rows


def _cell(value: object) -> str:
    match value:
        case {"estimate": float(estimate), "low": float(low), "high": float(high)}:
            return f"{estimate:.3f} [{low:.3f}, {high:.3f}]"
        case Mapping():
            return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(map(_cell, value))
        case float():
            return f"{value:.4g}"
    return str(value)
