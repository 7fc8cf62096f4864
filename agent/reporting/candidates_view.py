"""Show the candidates of a spec in a live table until all have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coda_agent.agent.reporting import progress
from coda_agent.agent.run import history
from coda_agent.agent.run.candidates import Candidate, EndedCandidate, merit, stop


def attend(candidates: Sequence[Candidate], console: Console) -> list[EndedCandidate]:
    """Show the candidates until all have ended; return their final states, best first. Ctrl-C stops all
    candidates."""
    try:
        _watch(candidates, console)
    except KeyboardInterrupt:
        stop(candidates)
        raise
    return sorted((candidate.ended() for candidate in candidates), key=lambda ended: merit(ended.past))


def _watch(candidates: Sequence[Candidate], console: Console) -> None:
    if not console.is_terminal:
        _tell(candidates, console)
        return
    with Live(table(candidates), console=console, auto_refresh=False) as shown:
        while any(c.running for c in candidates):
            time.sleep(progress.TICK)
            shown.update(table(candidates), refresh=True)
        shown.update(table(candidates), refresh=True)


def _tell(candidates: Sequence[Candidate], console: Console) -> None:
    """Print each candidate's new messages as plain lines until all candidates have ended."""
    told: dict[int, str] = {}
    while True:
        going = any(c.running for c in candidates)
        for candidate in candidates:
            words = candidate.says()
            if words and words != told.get(candidate.number):
                told[candidate.number] = words
                console.print(f"{candidate.number}: {words}")
        if not going:
            return
        time.sleep(progress.TICK)


def table(candidates: Sequence[Candidate]) -> Table:
    return progress.table(map(_row, candidates))


def _row(candidate: Candidate) -> tuple[int, history.Past, str]:
    if candidate.running:
        return candidate.number, candidate.reading.past(), candidate.says()
    past = candidate.ended().past
    return candidate.number, past, past.stopped or "ended"
