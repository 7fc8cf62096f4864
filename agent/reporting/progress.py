"""What a person sees of runs under way: a row each, read from its journal, and keys that stop it; of one that
goes on in this process also its gates and the words of its author."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from coda_agent.agent.reporting.render import STYLE
from coda_agent.agent.run import history
from coda_agent.agent.run.budget import Spent
from coda_agent.verifier.report import Accepted, Checked, Rejected

TICK = 0.25
STOP_ALL = "q"
ASIDE = "; in parentheses: measured and not accepted"


def table(rows: Iterable[tuple[int, history.Past, str]], caption: str) -> Table:
    """A row a run: its number, how it stands, what it is at now, what it has spent, how fast its best kernel
    is: its time, over torch.compile, and of the roofline. That of one that was rejected is in parentheses."""
    shown = list(rows)
    rejected = any(past.milliseconds and past.status != "accepted" for _, past, _ in shown)
    made = Table(box=None, pad_edge=False, caption=caption + (ASIDE if rejected else ""))
    for heading in ("", "run", "status", "now"):  # where there is little room, these give way
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


@contextmanager
def keys() -> Iterator[Callable[[], str]]:
    """A function that waits a moment and gives the keys pressed; without a keyboard it only waits."""
    import termios
    import tty

    def wait() -> str:
        time.sleep(TICK)
        return ""

    if not _keyboard():
        yield wait
        return

    def read() -> str:
        ready, _, _ = select.select([sys.stdin], [], [], TICK)
        return os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace") if ready else ""

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)  # Ctrl-C still interrupts
        yield read
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _keyboard() -> bool:
    """Whether keys come here. A shell's job in the background would be stopped for touching its terminal."""
    if not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # a terminal that controls no jobs
        return True


class Watch:
    """A listener of the loop: a live view on a terminal, plain lines elsewhere. With the name of a ``run``
    the view has its row, and its keys do in this thread what Ctrl-C does."""

    def __init__(self, console: Console, run: str = ""):
        self.console = console
        self._reading = history.Reading(run) if run else None
        self._row: Table | None = None
        self._live: Live | None = None
        self._over = threading.Event()
        self._states: dict[str, str] = {}
        self._title = ""
        self._words = ""
        self._spent = ""

    def __enter__(self) -> Watch:
        with ExitStack() as stack:
            if self.console.is_terminal:
                live = Live(self._view(), console=self.console, refresh_per_second=8, transient=True)
                self._live = stack.enter_context(live)
            if self._live and self._reading:
                pressed = stack.enter_context(keys())
                attending = threading.Thread(
                    target=self._attend, args=(self._reading, pressed, threading.get_ident()), daemon=True
                )
                attending.start()
                stack.callback(attending.join)
                stack.callback(self._over.set)
            self._shown = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        self._live = None

    def _attend(self, reading: history.Reading, pressed: Callable[[], str], thread: int) -> None:
        """Beside the loop: keep the row as the journal has it, and stop the loop once it is told to."""
        while not self._over.is_set():
            self._row = table([(1, reading.past(), self._now())], f"1 or {STOP_ALL} stops it")
            self._update()
            if {"1", STOP_ALL} & set(pressed()):
                signal.pthread_kill(thread, signal.SIGINT)
                return

    def attempt(self, number: int, limit: int) -> None:
        self._states, self._title, self._words = {}, f"attempt {number} of at most {limit}", ""
        if not self._live:
            self.console.print(self._title)
        self._update()

    def text(self, words: str) -> None:
        self._words += words
        if not self._live:
            *whole, self._words = self._words.split("\n")
            for line in whole:
                self.console.print(Text("  " + line, style="dim"))
        self._update()

    def gate(self, name: str, words: str) -> None:
        self._states[name] = words
        if not self._live and words == "passed" or words.startswith("rejected"):
            self.console.print(Text(f"  {name:10} {words}"))
        self._update()

    def report(self, number: int, report: Accepted | Checked | Rejected) -> None:
        self.console.print(Text(f"attempt {number}: {report.status}", style=STYLE[report.status]))
        if isinstance(report, Rejected):
            self.console.print(Text(f"  {report.gate}/{report.code}: {report.message}"))

    def tool(self, name: str, words: str) -> None:
        line = words.strip().splitlines()[0] if words.strip() else ""
        self.console.print(Text(f"  {name}: {line[:100]}", style="dim"))
        self._states = {}  # those of a draft
        self._update()

    def spent(self, spent: Spent) -> None:
        self._spent = str(spent)
        self._update()

    def _now(self) -> str:
        gates = list(self._states.items())  # at once, for the loop goes on meanwhile
        return " ".join(gates[-1]) if gates else "waiting for an answer"

    def _view(self) -> Group:
        gates, said = list(self._states.items()), self._words.strip()  # each at once, as in `_now`
        rows: list[Any] = [self._row] if self._row else []
        rows.append(Text(self._title, style="bold").append(f"  {self._spent}", style="dim"))
        if said and not gates:
            rows.append(Text(said.splitlines()[-1][-100:], style="dim"))
        for name, words in gates:
            if words == "passed":
                rows.append(Text(f"  ✓ {name}", style="green"))
            elif words.startswith("rejected"):
                rows.append(Text(f"  ✗ {name} {words}", style="red"))
            else:
                rows.append(Spinner("dots", Text(f" {name} {'' if words == 'started' else words}")))
        return Group(*rows)

    def _update(self) -> None:
        if self._live:
            self._live.update(self._view())
