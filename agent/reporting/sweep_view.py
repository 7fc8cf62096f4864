"""Show a sweep as a live table, or as a page with its success rate, cost, speedups, times and slots."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from coda_agent.agent.fleet import sweep
from coda_agent.agent.reporting import html_report, pages
from coda_agent.agent.reporting.charts import duration
from coda_agent.agent.run import history, run_summary, runs
from coda_agent.agent.run.budget import Spent
from coda_agent.agent.run.history import Past
from coda_agent.agent.storage.journal import Event, JournalError
from coda_agent.primitives.system.files import write_atomic

if TYPE_CHECKING:
    from rich.console import Group

    from coda_agent.agent.fleet.driver import Driver

SHOWN = 20  # the live table shows at most this many runs in progress
# maps the last word of a piece's name, such as "check" in "RUN check", to the piece's phase
PHASES = {"check": "checking", "compile": "compiling", "measure": "measuring"}


@dataclass(frozen=True)
class SlotUse:
    """The use of a slot (a core or a GPU) over all sessions of a sweep. ``present``: the seconds for which
    the slot was in the fleet. ``busy``: the seconds for which the slot worked. ``pieces``: the number of
    pieces of work that the slot did.
    ``left``: why the slot left the fleet; "" if the slot is still in the fleet."""

    name: str
    kind: str
    node: str
    present: float
    busy: float
    pieces: int
    left: str

    @property
    def idle(self) -> float:
        return max(0.0, 1 - self.busy / self.present) if self.present else 0.0


def slot_uses(events: Sequence[Event]) -> list[SlotUse]:
    """The use of every slot, with GPUs first."""
    ends: dict[int, float] = {}
    for event in events:
        if "at" in event.payload:
            ends[event.payload["session"]] = event.payload["at"]
    kinds: dict[str, tuple[str, str]] = {}
    present, busy, pieces = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    here: dict[tuple[int, str], float] = {}  # the time at which a slot joined, by session and slot
    left: dict[str, str] = {}
    for event in events:
        told, name = event.payload, event.payload.get("slot", "")
        if event.kind == "joined":
            here[told["session"], name], kinds[name] = told["at"], (told["kind"], told["node"])
            left.pop(name, None)
        elif event.kind == "left":
            kinds.setdefault(name, (told["kind"], told["node"]))
            present[name] += told["at"] - here.pop((told["session"], name), told["at"])
            left[name] = told["reason"]
        elif event.kind == "lease":
            busy[name] += told["seconds"]
            pieces[name] += 1
    for (session, name), since in here.items():
        present[name] += ends[session] - since
    found = [
        SlotUse(name, kind, node, present[name], busy[name], pieces[name], left.get(name, ""))
        for name, (kind, node) in kinds.items()
    ]
    return sorted(found, key=lambda use: (use.kind == "CPU", use.node, use.name))


def phases(events: Sequence[Event], answering: float) -> list[tuple[str, float, float, int]]:
    """Return one row per phase: its name, the seconds of work, the seconds of waiting for a slot, and the
    number of pieces of work. ``answering``: the seconds for which runs waited for answers of authors."""
    seconds, waited, pieces = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    for event in events:
        if event.kind == "lease":
            phase = PHASES.get(event.payload["piece"].rpartition(" ")[2], "other")
            seconds[phase] += event.payload["seconds"]
            waited[phase] += event.payload["waited"]
            pieces[phase] += 1
    found = [
        (phase, seconds[phase], waited[phase], pieces[phase]) for phase in PHASES.values() if pieces[phase]
    ]
    return [("authoring", answering, 0.0, 0), *found]


def live(driver: Driver, readings: Mapping[str, history.Reading]) -> Group:
    """A live view. It shows the runs in progress, the number of ended runs by status, and the slots."""
    from rich.console import Group
    from rich.text import Text

    from coda_agent.agent.reporting import progress

    now = dict(driver.now)
    rows = [(i, readings[name].past(), now[name]) for i, name in enumerate(readings, 1) if name in now]
    ended = Counter(e.past().status for name, e in readings.items() if name not in now)
    words = ", ".join(f"{number} {status}" for status, number in ended.items())
    lines = [Text(f"{driver.sweep.name}: {words}; {driver.purse.total()}", style="bold")]
    table = progress.table(rows[:SHOWN])
    if len(rows) > SHOWN:
        lines.append(Text(f"and {len(rows) - SHOWN} more under way", style="dim"))
    return Group(*lines, table, *map(Text, _slots_now(driver)))


def _slots_now(driver: Driver) -> Iterable[str]:
    clock, uses = driver.pool.clock(), list(driver.pool.uses.values())
    for use in driver.pool.gpus:
        busy = use.busy + (clock - use.since if use.now else 0.0)
        idle = 1 - busy / max(clock - use.joined, 1e-9)
        yield f"{use.slot.name} on {use.slot.node}: {use.now or 'idle'} ({idle:.0%} idle so far)"
    cores = [use for use in uses if use not in driver.pool.gpus]
    yield f"{sum(bool(use.now) for use in cores)} of {len(cores)} cores busy"
    yield from (f"left out: {name}: {why}" for name, why in driver.pool.left_out.items())
    yield from (f"refused: {node}: {why}" for node, why in driver.pool.refusals.items())


def as_dict(name: str) -> dict[str, Any]:
    """A sweep as data, for other software."""
    header, events = sweep.read(name)
    accounts = _accounts(events)
    pasts = [history.past_of(run) if account is None else account.past for run, account in accounts.items()]
    return {
        "sweep": Path(name).name,
        "budget": header.get("limits", {}),
        "statuses": dict(Counter(past.status for past in pasts)),
        "runs": [
            {"run": p.run, "spec": p.spec, "status": p.status, "why": p.why, "stopped": p.stopped,
             "attempts": p.attempts, "dollars": p.spent.dollars, "tokens": p.spent.tokens,
             "speedup": p.speedup, "milliseconds": p.milliseconds}
            for p in pasts
        ],
        "phases": [
            dict(zip(("phase", "seconds", "waited", "pieces"), row, strict=True))
            for row in phases(events, _answering(accounts))
        ],
        "slots": [vars(use) | {"idle": round(use.idle, 4)} for use in slot_uses(events)],
        "refused": {e.payload["node"]: e.payload["reason"] for e in events if e.kind == "refused"},
        "compiled": sum(event.kind == "compile" for event in events),
        "seconds": _wall(events),
        "driver_seconds": _driver(events),
    }  # fmt: skip


def write(name: str, out: Path | None = None) -> Path:
    """Write the page of a sweep to ``out``, by default in the sweep's folder. Also write the page of each run
    into that run's folder. Return the path of the sweep's page. Raises JournalError and OSError."""
    header, events = sweep.read(name)
    name = Path(name).name
    path = out or runs.runs_dir() / name / f"{name}.html"
    accounts = _accounts(events)
    links = {}
    for run, account in accounts.items():
        if account is not None:
            own = html_report.default_path(runs.folder(run))
            write_atomic(own, html_report.page(account))
            links[run] = quote(os.path.relpath(own, path.parent))
    write_atomic(path, page(name, header, events, accounts, links))
    return path


def page(
    name: str,
    header: Mapping[str, Any],
    events: Sequence[Event],
    accounts: Mapping[str, run_summary.Account | None],
    links: Mapping[str, str],
) -> str:
    """The page of a sweep as HTML."""
    pasts = [history.past_of(run) if account is None else account.past for run, account in accounts.items()]
    spent = sum((past.spent for past in pasts), Spent())
    specs = {past.spec for past in pasts}
    good = {past.spec for past in pasts if past.status == "accepted"}
    counted = Counter(past.status for past in pasts)
    facts = {
        "specs": f"{len(specs)}, of which {len(good)} have an accepted kernel",
        "runs": ", ".join(f"{number} {status}" for status, number in counted.items()),
        "budget": html_report.budget(header),
        "spent": str(spent),
        "cost per spec with an accepted kernel": f"${spent.dollars / len(good):.2f}" if good else "none",
        "time": duration(_wall(events)),
        "driver's processor time": duration(_driver(events)),
        "programs compiled": str(sum(event.kind == "compile" for event in events)),
        "speedup over torch.compile": _mean(pasts),
    }
    refused = [(e.payload["node"], e.payload["reason"]) for e in events if e.kind == "refused"]
    return pages.page(
        "sweep.html",
        title=name,
        facts=facts.items(),
        runs=[_row(past, links.get(past.run)) for past in pasts],
        phases=[
            (phase, duration(seconds), duration(waited), str(number) if number else "–")
            for phase, seconds, waited, number in phases(events, _answering(accounts))
        ],
        slots=[
            (
                u.name,
                u.kind,
                u.node,
                duration(u.present),
                duration(u.busy),
                f"{u.idle:.0%}",
                str(u.pieces),
                u.left,
            )
            for u in slot_uses(events)
        ],
        refused=refused,
    )


def _row(past: Past, link: str | None) -> tuple[str, ...]:
    stopped = f"stopped: {past.stopped}" if past.stopped else ""
    why = ", ".join(filter(None, [past.why, stopped]))
    return (
        pages.macro("link", past.run, link) if link else past.run,
        pages.macro("status", past.status, why),
        str(past.attempts),
        f"{past.spent.tokens:,}",
        history.dollars(past.spent),
        f"{past.milliseconds:.3f}" if past.milliseconds else "",
        f"{past.speedup:.3f}" if past.speedup else "",
        f"{past.roofline:.0%}" if past.roofline else "",
    )


def _accounts(events: Sequence[Event]) -> dict[str, run_summary.Account | None]:
    """The summaries of a sweep's runs, by the run's name; None for a run that cannot be read."""
    found: dict[str, run_summary.Account | None] = {}
    for name in sweep.members(events):
        try:
            found[name] = run_summary.read(runs.runs_dir() / name)
        except JournalError:
            found[name] = None
    return found


def _answering(accounts: Mapping[str, run_summary.Account | None]) -> float:
    steps = (step for account in accounts.values() if account for step in account.steps)
    return sum(step.seconds for step in steps if step.event.kind in ("answer", "reserved", "settled"))


def _driver(events: Sequence[Event]) -> float:
    """The processor time that the driver used, in seconds."""
    return sum(event.payload["driver_seconds"] for event in events if event.kind == "session")


def _wall(events: Sequence[Event]) -> float:
    """The total duration of all sessions, in seconds."""
    ends = {e.payload["session"]: e.payload["at"] for e in events if "at" in e.payload}
    return sum(ends.values())


def _mean(pasts: Sequence[Past]) -> str:
    found = [past.speedup for past in pasts if past.status == "accepted" and past.speedup]
    return (
        f"{geometric_mean(found):.3f}, the geometric mean of {len(found)} kernels"
        if found
        else "none measured"
    )
