"""Show the state of the current run on one line of a terminal, for commands that start many runs in turn."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from coda_agent.agent.run.budget import Spent
from coda_agent.verifier.report import Report


class QuietView:
    """Show only a loop's current step, on one line. ``speaks``: also print the provider's messages, which say
    where the provider waits for an answer."""

    def __init__(self, console: Console, speaks: bool):
        self.console, self.speaks = console, speaks
        self._attempt = self._words = ""

    def __enter__(self) -> QuietView:
        self._status = self.console.status("") if self.console.is_terminal else None
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()

    def attempt(self, number: int, limit: int) -> None:
        self._attempt = f"attempt {number} of at most {limit}"
        self._now("waiting for an answer")

    def text(self, words: str) -> None:
        *whole, self._words = (self._words + words).split("\n")
        for line in whole if self.speaks else ():
            self.console.print(Text(f"  {line}", style="dim"), soft_wrap=True)

    def gate(self, name: str, words: str) -> None:
        self._now(f"{name} {words}")

    def report(self, number: int, report: Report) -> None:
        self._now(report.status)

    def tool(self, name: str, words: str) -> None:
        self._now(name)

    def spent(self, spent: Spent) -> None:
        pass

    def _now(self, words: str) -> None:
        if self._status:
            self._status.update(Text(f"{self._attempt}, {words}"[: self.console.width - 4], style="dim"))
