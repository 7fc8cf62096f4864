"""``coda-agent report``: a run as one HTML page that needs no network, no script and no other file.

What a journal holds others wrote, a model above all: it reaches the page through `markup.element` alone,
which escapes it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from coda_agent.agent.prompts.markdown_fences import PYTHON, blocks
from coda_agent.agent.providers import Turn, Usage
from coda_agent.agent.reporting.charts import Mark, bars, duration, number, timeline
from coda_agent.agent.reporting.markup import Html, code, details, document, element, facts, table
from coda_agent.agent.reporting.render import figures, interval, rivals
from coda_agent.agent.reporting.rounds import HEADINGS, cells, rounds
from coda_agent.agent.run.run_summary import KINDS, Account, Attempt, Draft, Step, Verdict, read
from coda_agent.agent.run.runs import folder
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.report import GATES, Accepted, Checked, Rejected, Timing

_CONTROLS = "Controls: the ratio of a kernel to itself, and of one with a planted delay to the same without"


def write(name: str, out: Path | None = None) -> Path:
    """Write the page of a run, which may be under way, to ``out`` or RUN.html in its folder; where it is.

    Raises JournalError for a run that is not there or that another version wrote, and OSError.
    """
    directory = folder(name)
    path = out or beside(directory)
    write_atomic(path, page(read(directory)))
    return path


def beside(directory: Path) -> Path:
    """The page's place in the folder of a run."""
    return directory / f"{directory.name}.html"


def page(run: Account) -> str:
    """The page, as text."""
    title = f"{run.past.run}: {run.past.status}"
    shown: list[Html] = []
    before: Attempt | None = None
    for attempt in run.attempts:
        shown.append(_section(attempt, before))
        before = attempt if attempt.source else before
    return document(title, _head(run), _timeline(run), _rounds(run), *shown, _spec(run))


def _head(run: Account) -> Html:
    past, header = run.past, run.header
    replayed = f", of run {header['replays']}" if header.get("replays") else ""
    limit = f" of at most {header['attempts']}" if header.get("attempts") else ""
    limit += f" and {header['improve']} to improve it" if header.get("improve") else ""
    status = [element("strong", past.status, class_=past.status), element("span", f" {past.why}")]
    pairs = {
        "spec": past.spec,
        "status": Html("".join(status)),
        "provider": f"{header.get('provider', 'unknown')}{replayed}",
        "author": past.author,
        "attempts": f"{len(run.attempts)}{limit}",
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
    return element("header", element("h1", past.run), facts(pairs.items()))


def budget(header: Mapping[str, Any]) -> str:
    """What a run may spend, in words."""
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


def _timeline(run: Account) -> Html:
    if not run.steps:
        return element("section", element("h2", "Timeline"), element("p", "No event yet."))
    marks = [_mark(step) for step in run.steps]
    seen = {mark.kind for mark in marks}
    others = sorted({step.event.kind for step in run.steps} - set(KINDS))
    legend = [_swatch(kind, kind) for kind in KINDS if kind in seen]
    legend += [_swatch("other", ", ".join(others))] if others else []
    rows = [(s.event.key, s.event.kind, _moment(s.event.time), duration(s.seconds)) for s in run.steps]
    return element(
        "section",
        element("h2", "Timeline"),
        element("p", "A bar ends when its event was written down and begins at the event before it."),
        timeline(f"Timeline of {len(rows)} events in {_total(run)}", marks),
        element("ul", *legend, class_="legend"),
        details("Events", table("Events of the journal", ("key", "kind", "written", "after"), rows)),
    )


def _mark(step: Step) -> Mark:
    row = f"attempt {step.attempt}" if step.attempt else "run"
    kind = step.event.kind if step.event.kind in KINDS else "other"
    return Mark(row, kind, step.event.key, step.seconds)


def _total(run: Account) -> str:
    return duration(sum(step.seconds for step in run.steps))


def _rounds(run: Account) -> Html:
    """The cost and outcome of each attempt, where there are several."""
    found = rounds(run)
    if len(found) < 2:
        return Html()
    rows = map(cells, found)
    return element("section", element("h2", "Rounds"), table("Cost and outcome of each", HEADINGS, rows))


def _swatch(css: str, kind: str) -> Html:
    return element("li", element("span", class_=css), kind)


def _section(attempt: Attempt, before: Attempt | None) -> Html:
    report, name = attempt.report, f"Attempt {attempt.number}"
    spent = sum((turn.usage for turn in attempt.turns), Usage())
    return element(
        "section",
        element("h2", f"{name}: ", element("span", attempt.status, class_=attempt.status)),
        element("p", f"Tokens: {_tokens(spent)}.", class_="dim") if attempt.turns else Html(),
        *(_draft(number, draft) for number, draft in enumerate(attempt.drafts, 1)),
        *_source(attempt, before),
        *(_said(turn) for turn in attempt.turns),
        *(_verdict(report, attempt.source) if report else ()),
        *(element("p", f"A measurement was void: {reason}", class_="unmeasured") for reason in attempt.voids),
        *(_measured(attempt) if attempt.timings else ()),
        *(_conditions(report) if isinstance(report, Accepted) else ()),
        id=f"attempt-{attempt.number}",
    )


def _draft(number: int, draft: Draft) -> Html:
    report = draft.report
    why = f" at {report.gate}: {report.code}" if isinstance(report, Rejected) else ""
    return details(
        f"Draft {number}: {report.status}{why}", code(draft.source), *_verdict(report, draft.source)
    )


def _source(attempt: Attempt, before: Attempt | None) -> list[Html]:
    if not attempt.source:
        return [element("p", "No source." if attempt.report else "No source yet.")]
    if before is None:
        return [element("h3", "Source"), code(attempt.source)]
    lines = _diff(before, attempt)
    changed = code(*lines) if lines else element("p", "The same source again.")
    whole = details("The whole source", code(attempt.source))
    return [element("h3", f"Source, as changed since attempt {before.number}"), changed, whole]


def _diff(before: Attempt, after: Attempt) -> list[Html]:
    old, new = (a.source.rstrip("\n").split("\n") for a in (before, after))
    lines = list(difflib.unified_diff(old, new, lineterm=""))[2:]  # without the names of two files
    css = {"+": "add", "-": "del", "@": "hunk", " ": "same"}
    return [element("span", f"{line}\n", class_=css[line[0]]) for line in lines]


def _said(turn: Turn) -> Html:
    """The author's words around its code."""
    *_, block = [None, *blocks(turn.text, *PYTHON)]
    words = turn.text
    if block:
        words = f"{words[: block.start()]}[the source]\n{words[block.end() :]}"
    return details(f"The answer's words, by {turn.author}", element("p", words.strip(), class_="words"))


def _verdict(report: Verdict, source: str) -> list[Html]:
    shown = [element("h3", "Gates"), _gates(report)]
    if isinstance(report, Checked):
        shown.append(element("p", report.unmeasured))
    if isinstance(report, Rejected):
        shown.append(element("p", *_place(report, source), report.message, class_="words rejected"))
        evidence = {key: value for key, value in report.evidence.items() if key != "timings"}
        if evidence:
            shown.append(details("Evidence", code(json.dumps(evidence, indent=1))))
    return shown


def _place(report: Rejected, source: str) -> list[Html]:
    if report.line is None:
        return []
    lines = dict(enumerate(source.split("\n"), 1))
    text = lines.get(report.line, "").strip()
    return [element("strong", f"line {report.line}: "), element("code", text), Html("\n")]


def _gates(report: Verdict) -> Html:
    passed = element("span", "passed", class_="passed")
    rows = [(g.gate, passed, f"{g.seconds:.2f}", "\n".join([figures(g), *g.findings])) for g in report.gates]
    if isinstance(report, Rejected):
        rows.append((report.gate, element("span", "rejected", class_="rejected"), "", report.code))
    if isinstance(report, Checked):
        done = {gate.gate for gate in report.gates}
        rows += [
            (name, element("span", "not run", class_="dim"), "", "") for name in GATES if name not in done
        ]
    return table("In the order they run", ("gate", "result", "seconds", "figures"), rows)


def _measured(attempt: Attempt) -> list[Html]:
    shown = [element("h3", "Times")]
    for t in attempt.timings:
        sizes = ", ".join(f"{dim} {size}" for dim, size in t.sizes.items())
        title = f"Case {t.case}: milliseconds of each arm ({sizes})"
        shown += [element("p", title), bars(title, t.milliseconds, t.roofline_milliseconds)]
    arms = list(dict.fromkeys(arm for t in attempt.timings for arm in t.ratios))
    rows = [(t.case, *(interval(t.ratios.get(arm)) for arm in arms)) for t in attempt.timings]
    caption = "Ratios, arm / candidate, with their intervals: above 1 the candidate is faster"
    chosen = [element("p", line) for line in rivals(attempt.timings)]
    return [*shown, table(caption, ("case", *arms), rows), _costs(attempt.timings), *chosen]


def _costs(timings: Iterable[Timing]) -> Html:
    headings = ("case", "candidate ms", "in a graph", "roofline ms", "host µs", "tuning s", "schedules")
    rows = [
        (
            t.case,
            number(t.milliseconds["candidate"]),
            number(t.graph_milliseconds) if t.graph_milliseconds else "",
            number(t.roofline_milliseconds),
            number(t.host_microseconds["candidate"]),
            f"{t.tuning_seconds:.1f}",
            "\n".join(f"step {step}: {_cell(schedule)}" for step, schedule in t.schedules.items()),
        )
        for t in timings
    ]
    return table("The candidate", headings, rows)


def _conditions(report: Accepted) -> list[Html]:
    plain = {name: value for name, value in report.conditions.items() if not isinstance(value, Mapping)}
    shown = [
        element("h3", "Conditions"),
        facts((name, _cell(value)) for name, value in ({"measured": report.date} | plain).items()),
        element("h3", "Versions"),
        facts(report.identity.versions.items()),
    ]
    for name in sorted(report.conditions.keys() - plain.keys()):
        found = report.conditions[name].items()
        rows = {key: row if isinstance(row, Mapping) else {"": row} for key, row in found}
        shown.append(details(f"Conditions: {name}", _records(name, rows)))
    controls = {str(number): row for number, row in enumerate(report.controls, 1)}
    if controls:
        shown += [element("h3", "Controls"), _records(_CONTROLS, controls)]
    return shown


def _records(caption: str, records: Mapping[str, Mapping[str, Any]]) -> Html:
    """Rows of whatever fields they have."""
    fields = list(dict.fromkeys(field for row in records.values() for field in row))
    rows = [(name, *(_cell(row.get(field, "")) for field in fields)) for name, row in records.items()]
    return table(caption, ("", *fields), rows)


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


def _spec(run: Account) -> Html:
    note = element("p", "Edited since the run started.", class_="rejected") if run.edited else Html()
    return element("section", element("h2", "Spec"), note, details("spec.yaml", code(run.spec)))
