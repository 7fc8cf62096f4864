"""Past runs, as their journals tell: looked at without taking them from whoever has them open."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from agent.journal import Event, JournalError, glance
from agent.loop import last_verified, measurement
from agent.providers import Turn, Usage
from agent.runs import names, runs_dir
from verifier.report import REPORT, joined

if TYPE_CHECKING:
    from rich.table import Table

UNDECIDED = "authoring"  # no attempt has been verified yet


@dataclass(frozen=True)
class Past:
    """A run: what of, who wrote, and how it stands. ``status``: accepted, checked, rejected, authoring
    (nothing verified yet) or unreadable, and then ``why``; ``why`` of a rejected one is gate and code."""

    run: str
    status: str
    why: str = ""
    spec: str = ""
    author: str = ""
    attempts: int = 0
    started: str = ""
    ended: str = ""
    usage: Usage = Usage()


def past() -> list[Past]:
    """All runs, oldest first; one whose journal cannot be read among them."""
    return [_past(name) for name in names()]


def as_dict(found: list[Past]) -> dict[str, Any]:
    return {"runs": [asdict(run) for run in found]}


def as_table(found: list[Past]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from agent.render import STYLE

    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, overflow="fold")  # to be copied whole
    for heading in ("status", "author"):
        table.add_column(heading)
    for heading in ("attempts", "tokens in", "tokens out"):
        table.add_column(heading, justify="right")
    for run in found:
        status = Text(run.status, style=STYLE.get(run.status, "dim"))
        if run.why:
            status.append(f" {run.why}", style="dim")
        read = run.usage.input_tokens + run.usage.cache_read_tokens + run.usage.cache_write_tokens
        figures = (str(run.attempts), f"{read:,}", f"{run.usage.output_tokens:,}")
        table.add_row(Text(run.run), status, Text(run.author), *figures)
    return table


def _past(name: str) -> Past:
    try:
        header, events = glance(runs_dir() / name / "journal.db")
        return _told(name, header, events)
    except JournalError as error:
        return Past(name, "unreadable", str(error))
    except (ValidationError, KeyError, TypeError):
        return Past(name, "unreadable", "written by another version of coda-agent")


def _told(name: str, header: dict[str, Any], events: list[Event]) -> Past:
    payloads = {event.key: event.payload for event in events}
    turns = [Turn.from_json(p) for key, p in payloads.items() if key.startswith("answer/")]
    status, why = UNDECIDED, ""
    last = last_verified(payloads)
    if last is not None:
        report = REPORT.validate_python(payloads[f"report/{last}"]["report"])
        found = joined(report, measurement(payloads, last))
        status = found.status
        why = f"{found.gate}/{found.code}" if found.status == "rejected" else ""
    return Past(
        run=name,
        status=status,
        why=why,
        spec=str(header["spec"]),
        author=turns[-1].author if turns else str(header.get("author") or header["provider"]),
        attempts=len(turns),
        started=events[0].time if events else "",
        ended=events[-1].time if events else "",
        usage=sum((turn.usage for turn in turns), Usage()),
    )
