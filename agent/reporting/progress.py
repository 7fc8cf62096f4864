"""Show live progress in a table with one row per run, which is read from the run's journal. For the run in
this process, also show its gates and the author's text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from coda_agent.agent.run import history
from coda_agent.agent.run.budget import Spent
from coda_agent.agent.terminal.console import STYLE
from coda_agent.verifier.report import Rejected, Report

TICK = 0.25  # seconds between reads of a journal
REJECTED = "in parentheses: measured, but not accepted"


def table(rows: Iterable[tuple[int, history.Past, str]]) -> Table:
    """A table with one row per run. A row has the run's number, name, status, activity and cost, and figures
    of the run's best kernel: time, speedup over torch.compile and share of the roofline. Parentheses mark
    figures of a kernel that was measured but not accepted."""
    shown = list(rows)
    rejected = any(past.milliseconds and past.status != "accepted" for _, past, _ in shown)
    made = Table(box=None, pad_edge=False, caption=REJECTED if rejected else None)
    for heading in ("", "run", "status", "now"):  # on a narrow terminal, these columns shrink first
        made.add_column(heading)
    for heading in ("attempts", "tokens", "dollars", "best ms", "speedup", "roofline"):
        made.add_column(heading, justify="right", no_wrap=True)
    for number, past, now in shown:
        made.add_row(
            str(number),
            _cut(past.run),
            _cut(past.status, STYLE.get(past.status, "dim")),
            _cut(now[:40], "dim"),
            str(past.attempts),
            f"{past.spent.tokens:,}",
            history.dollars(past.spent),
            *_speed(past),
        )
    return made


def _speed(past: history.Past) -> tuple[str, str, str]:
    if past.milliseconds is None or past.speedup is None or past.roofline is None:
        return "", "", ""
    words = f"{past.milliseconds:.3f}", f"{past.speedup:.3f}", f"{past.roofline:.0%}"
    return words if past.status == "accepted" else (f"({words[0]})", f"({words[1]})", f"({words[2]})")


def _cut(words: str, style: str = "") -> Text:
    return Text(words, style=style, no_wrap=True, overflow="ellipsis")


class LiveView:
    """Show the loop's progress: a live view on a terminal, plain lines elsewhere. ``run``: the run whose row
    the live view shows above the gates; "" for no row."""

    def __init__(self, console: Console, run: str = ""):
        self.console = console
        self._reading = history.Reading(run) if run else None
        self._live: Live | None = None
        self._spinners = defaultdict[str, Spinner](lambda: Spinner("dots"))  # by gate
        self._states: dict[str, str] = {}
        self._title = ""
        self._words = ""
        self._spent = ""

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            live = Live(
                get_renderable=self._view,
                console=self.console,
                refresh_per_second=1 / TICK,
                transient=True,
            )
            live.start()
            self._live = live
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        self._live = None

    def attempt(self, number: int, limit: int) -> None:
        self._states, self._title, self._words = {}, f"attempt {number} of at most {limit}", ""
        if not self._live:
            self.console.print(self._title)

    def text(self, words: str) -> None:
        self._words += words
        if not self._live:
            *whole, self._words = self._words.split("\n")
            for line in whole:
                self.console.print(Text("  " + line, style="dim"))

    def gate(self, name: str, words: str) -> None:
        self._states[name] = words
        rejected = "rejected" in words.partition(":")[0]  # a gate's name may precede "rejected"
        if rejected or not self._live and words.endswith("passed"):
            self.console.print(Text(f"  {name:10} {words}"))

    def report(self, number: int, report: Report) -> None:
        self.console.print(Text(f"attempt {number}: {report.status}", style=STYLE[report.status]))
        if isinstance(report, Rejected):
            self.console.print(Text(f"  {report.gate}/{report.code}: {report.place}{report.message}"))

    def tool(self, name: str, words: str) -> None:
        line = words.strip().splitlines()[0] if words.strip() else ""
        self.console.print(Text(f"  {name}: {line[:100]}", style="dim"))
        self._states = {}  # forget the states of the gates that checked a draft

    def spent(self, spent: Spent) -> None:
        self._spent = str(spent)

    def _now(self) -> str:
        gates = list(self._states.items())  # a copy, because the loop's thread changes the states meanwhile
        return " ".join(gates[-1]) if gates else "waiting for an answer"

    def _view(self) -> Group:
        gates, said = list(self._states.items()), self._words.strip()  # a copy, as in `_now`
        rows: list[Any] = [table([(1, self._reading.past(), self._now())])] if self._reading else []
        rows.append(Text(self._title, style="bold").append(f"  {self._spent}", style="dim"))
        if said and not gates:
            rows.append(Text(said.splitlines()[-1][-100:], style="dim"))
        for name, words in gates:
            if words == "passed":
                rows.append(Text(f"  ✓ {name}", style="green"))
            elif words.startswith("rejected"):
                rows.append(Text(f"  ✗ {name} {words}", style="red"))
            else:
                self._spinners[name].update(text=Text(f" {name} {'' if words == 'started' else words}"))
                rows.append(self._spinners[name])
        return Group(*rows)
