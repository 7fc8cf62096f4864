"""Run the real command while a test watches and controls it, with or without a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkout import ROOT
from waiting import eventually

# A test suite that runs in the background ignores SIGINT, and its child processes inherit this setting. The
# program below therefore restores Python's handler of SIGINT.
INTERRUPTIBLE = """
import signal
from coda_agent.agent.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # escape sequences: colours and cursor movements


PATIENCE = 300.0  # seconds; the machine may be busy with other work


def expect(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for the condition. Fail at once if ``process``, which should make the condition true, ends before
    the condition is true."""

    def over() -> bool:
        return condition() or (process is not None and process.poll() is not None)

    assert eventually(over, PATIENCE)
    assert condition(), f"it ended before that: {_errors(process)}"


def _errors(process: subprocess.Popen[bytes] | None) -> str:
    return process.stderr.read().decode() if process and process.stderr else "see its terminal"


@contextmanager
def going(
    arguments: Sequence[str | Path], prompts: Sequence[Path], **streams: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command. When its process has written all ``prompts`` and waits for answers, yield this
    process."""
    given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | streams
    command = [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(command, env=environment, **given) as process:  # type: ignore[call-overload]
        try:
            expect(lambda: all(path.exists() for path in prompts), process)
            yield process
        finally:
            process.kill()


@dataclass
class Terminal:
    """A pseudo-terminal. The test reads from the end ``ours``; the process under test uses the end
    ``theirs``. ``seen`` is the output so far, without escape sequences."""

    ours: int
    theirs: int
    _seen: bytearray = field(default_factory=bytearray)

    @property
    def streams(self) -> dict[str, int]:
        return dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)

    @property
    def seen(self) -> str:
        return CONTROL.sub("", self._seen.decode("utf-8", "replace"))

    def read(self) -> bool:
        """Read the available output; return whether there was any."""
        ready, _, _ = select.select([self.ours], [], [], 0.1)
        if ready:
            self._seen += os.read(self.ours, 65536)
        return bool(ready)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Yield a terminal. A thread reads the terminal's output continuously. Otherwise the terminal's buffer
    could fill up, and the process under test would wait."""
    made, over = Terminal(*pty.openpty()), threading.Event()

    def read() -> None:
        while made.read() or not over.is_set():
            pass

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield made
    except BaseException as failed:
        failed.add_note(f"on the terminal: {made.seen[-4000:]}")
        raise
    finally:
        over.set()
        reading.join()
        os.close(made.ours)
        os.close(made.theirs)
