"""Author several candidate kernels for one spec at once. Each candidate is a run in its own process.

Candidates share only the GPU, which one candidate uses at a time. If a candidate stops or dies, the other
candidates continue. A candidate can be resumed, reviewed and accepted by the name of its run.
``reporting.candidates_view`` shows the candidates.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from coda_agent.agent.run import history
from coda_agent.agent.run.runs import runs_dir
from coda_agent.primitives.system import subprocesses

# The program of a child process. It makes SIGINT raise KeyboardInterrupt, because shells make background
# processes ignore this signal.
RESUME = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from coda_agent.agent.cli.main import main
main()
"""
SPEAKER = "coda-agent: "  # the beginning of a line that states an error
LOG = "log.txt"  # the file in a run's folder for the output of the run's process
GRACE = 20.0  # seconds that a candidate may take to stop after SIGINT
RANK = ("accepted", "checked", "rejected", "authoring", "unreadable")  # best first


@dataclass
class Candidate:
    """A run in its own process. ``number`` counts from 1."""

    number: int
    reading: history.Reading
    process: subprocess.Popen[bytes]

    @property
    def run(self) -> str:
        return self.reading.run

    @property
    def running(self) -> bool:
        return not subprocesses.ended(self.process)

    def says(self) -> str:
        """The last line that the process printed."""
        with (runs_dir() / self.run / LOG).open("rb") as file:
            lines = subprocesses.tail(file).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def ended(self) -> EndedCandidate:
        """The state of a candidate whose process has ended."""
        past, status = self.reading.past(), subprocesses.end(self.process)
        if past.status == history.UNDECIDED:
            past = replace(past, stopped=self._reason(past, status))
        return EndedCandidate(past, status)

    def _reason(self, past: history.Past, status: int) -> str:
        """Why a process ended without a verdict. The process's last line has priority over the journal, which
        may lack the reason, for example if the disk was full."""
        if status < 0:
            return f"killed by {subprocesses.how(status)}"
        words = self.says().removeprefix(SPEAKER) or past.stopped
        return words or f"ended with status {status}; coda-agent resume {self.run} says why"

    def stop(self) -> None:
        """Interrupt the process as Ctrl-C does, so that its journal keeps every received answer."""
        if self.running:
            self.process.send_signal(signal.SIGINT)


@dataclass(frozen=True)
class EndedCandidate:
    """The final state of a candidate, and the exit status of its process (negative for a signal)."""

    past: history.Past
    status: int


@contextmanager
def started(names: Sequence[str], arguments: Sequence[str]) -> Iterator[list[Candidate]]:
    """Start one process for each run. Each process resumes its run with ``arguments``. All processes are
    ended at the end of the ``with`` block."""
    with ExitStack() as stack:
        found = []
        for number, name in enumerate(names, 1):
            log = stack.enter_context((runs_dir() / name / LOG).open("ab"))
            command = [sys.executable, "-c", RESUME, "resume", name, *arguments]
            # the process dies with its parent, because an orphan would continue to spend money
            process = subprocesses.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": subprocesses.path()},
            )
            stack.callback(subprocesses.end, process)
            found.append(Candidate(number, history.Reading(name), process))
        yield found


def merit(past: history.Past) -> tuple[int, float, int]:
    """A sort key, best first: status, then speedup, then fewest attempts."""
    return RANK.index(past.status), -(past.speedup or 0.0), past.attempts


def stop(candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        candidate.stop()
    deadline = time.monotonic() + GRACE
    while any(c.running for c in candidates) and time.monotonic() < deadline:
        time.sleep(0.05)
