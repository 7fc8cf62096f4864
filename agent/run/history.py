"""Read the state of runs from their journals, even while other processes have the journals open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from coda_agent.agent.providers import Usage
from coda_agent.agent.run.budget import Spent, spent
from coda_agent.agent.run.loop import STOPPED
from coda_agent.agent.run.runs import JOURNAL, names, runs_dir
from coda_agent.agent.run.view import RunView
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import Event, JournalError, is_open
from coda_agent.verifier.decision import BASELINE
from coda_agent.verifier.report import CANDIDATE, Accepted, Rejected, Timing

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table
    from rich.text import Text

UNDECIDED = "authoring"  # the status until a source has been verified
NONE = "–"  # shown for a missing figure


@dataclass(frozen=True)
class Past:
    """The state of a run. ``status``: accepted, checked, rejected, authoring (nothing verified yet) or
    unreadable. ``why``: the gate and code of a rejection, or why the run is unreadable. ``running``: whether
    a process has the run open. ``stopped``: why the run ended early; "" if it did not end early."""

    run: str
    status: str
    why: str = ""
    spec: str = ""
    author: str = ""
    attempts: int = 0
    started: str = ""
    ended: str = ""
    usage: Usage = Usage()
    spent: Spent = Spent()
    # geometric means over the cases of the accepted kernel; without one, of the fastest rejected kernel
    milliseconds: float | None = None
    speedup: float | None = None  # over torch.compile
    roofline: float | None = None  # fraction of the roofline
    running: bool = False
    stopped: str = ""


def past() -> list[Past]:
    """All runs, oldest first, including unreadable ones."""
    return [past_of(name) for name in names()]


def as_dict(found: list[Past]) -> dict[str, Any]:
    attempts, whole = _total(found)
    total = {"runs": len(found), "attempts": attempts, "spent": asdict(whole)}
    return {"runs": [asdict(run) for run in found], "total": total}


def as_table(found: list[Past]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, overflow="fold")  # unbroken, because users copy the whole name
    table.add_column("status", min_width=12, overflow="fold")
    table.add_column("author", overflow="fold")
    attempts, whole = _total(found)
    total = _figures(attempts, whole)
    told = [n for n, figure in enumerate(total) if figure != NONE]  # leave out columns without figures
    for place in told:
        table.add_column(("attempts", "tokens", "dollars", "GPU s")[place], justify="right")
    for run in found:
        figures = _figures(run.attempts, run.spent)
        table.add_row(Text(run.run), _state(run), Text(run.author), *(figures[n] for n in told))
    table.add_section()
    table.add_row(f"{len(found)} run(s)", "", "", *(total[n] for n in told), style="bold")
    if whole.uncertain_tokens:
        uncertain = f"{whole.uncertain_tokens:,} tokens, ${whole.uncertain_dollars:.2f}"
        table.caption = f"~ includes reservations for requests with an unknown final cost, {uncertain} in all"
    return table


def _state(run: Past) -> Text:
    """Text that shows the status of a run, and whether a process works on the run."""
    from rich.text import Text

    from coda_agent.agent.terminal.console import STYLE

    state = ""
    if run.running:
        state = "running"
    elif run.stopped:
        state = f"stopped: {run.stopped.partition('; ')[0].removeprefix('stopped ')}"
    elif run.status == UNDECIDED:
        state = "interrupted: resume it"  # the process ended without recording a reason
    if state and run.status == UNDECIDED:
        return Text(state, style="dim")
    standing = Text(run.status, style=STYLE.get(run.status, "dim"))
    return standing.append(
        "".join(f" {words}" for words in (run.why, state and f"({state})") if words), "dim"
    )


def _total(found: list[Past]) -> tuple[int, Spent]:
    """Total attempts and spending."""
    return sum(run.attempts for run in found), sum((run.spent for run in found), Spent())


def _figures(attempts: int, spent: Spent) -> tuple[str, ...]:
    tokens = f"{'~' if spent.uncertain_tokens else ''}{spent.tokens:,}" if spent.tokens else NONE
    seconds = f"{spent.gpu_seconds:,.0f}" if spent.gpu_seconds else NONE
    return str(attempts), tokens, dollars(spent), seconds


def dollars(spent: Spent) -> str:
    """Format the dollars spent; ~ marks an amount that is partly uncertain."""
    return f"{'~' if spent.uncertain_tokens else ''}{spent.dollars:.2f}" if spent.dollars else NONE


@dataclass
class Reading:
    """Follows a run's journal while it grows. Each event is read only once."""

    run: str
    _events: list[Event] = field(default_factory=list)
    _past: Past | None = None

    def past(self) -> Past:
        """The current state of the run. Never raises."""
        path = runs_dir() / self.run / JOURNAL
        try:
            header, events = record.glance(path, self._events)
        except JournalError as error:
            return Past(self.run, "unreadable", str(error))
        if len(events) > len(self._events) or self._past is None:
            self._events, self._past = events, state_of(self.run, header, events)
        return attended(self._past, path)


def past_of(name: str) -> Past:
    """The state of one run. Never raises."""
    return Reading(name).past()


def attended(run: Past, journal: Path) -> Past:
    """Return the state ``run``. If a process works on the run, set ``running`` and clear ``stopped``."""
    return replace(run, running=True, stopped="") if is_open(journal) else run


def state_of(name: str, header: dict[str, Any], events: list[Event]) -> Past:
    """The state of a run according to its journal."""
    run = RunView(events)
    status, why = UNDECIDED, ""
    timings: tuple[Timing, ...] = ()
    if run.standing:
        found = run.standing.report
        status = found.status
        why = f"{found.gate}/{found.code}" if isinstance(found, Rejected) else ""
        timings = found.timings if isinstance(found, Accepted) else _fastest_rejected(run)
    return Past(
        run=name,
        status=status,
        why=why,
        spec=str(header["spec"]),
        author=run.turns[-1].author if run.turns else str(header.get("author") or header["provider"]),
        attempts=(run.last.number if run.last else 0) + _answered_since(events),
        started=events[0].time if events else "",
        ended=events[-1].time if events else "",
        usage=run.usage,
        spent=spent(events),
        milliseconds=_mean(t.milliseconds[CANDIDATE] for t in timings),
        speedup=_mean(t.ratios[BASELINE].estimate for t in timings),
        roofline=_mean(t.roofline_milliseconds / t.milliseconds[CANDIDATE] for t in timings),
        stopped=str(events[-1].payload["reason"]) if events and events[-1].kind == STOPPED else "",
    )


def _fastest_rejected(run: RunView) -> tuple[Timing, ...]:
    found = [a.measurement for a in run.attempts.values() if isinstance(a.measurement, Rejected)]
    rows = filter(None, map(record.timings_of, found))
    return max(rows, key=lambda rows: _mean(t.ratios[BASELINE].estimate for t in rows) or 0.0, default=())


def _answered_since(events: list[Event]) -> bool:
    """Whether the last answer has no report yet."""
    kinds = [event.kind for event in events if event.kind in ("answer", "report")]
    return kinds[-1:] == ["answer"]


def _mean(ratios: Iterable[float]) -> float | None:
    found = list(ratios)
    return geometric_mean(found) if found else None
