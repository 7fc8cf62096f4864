"""The result of a `coda-agent` command. The command ran in the test's process or in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    def said(self) -> str:
        """Return the one message on stderr, with its lines joined."""
        assert self.out == "" and "Traceback" not in self.err
        assert self.err.startswith("coda-agent: ") and "\ncoda-agent: " not in self.err
        return " ".join(self.err.split())


Command = Callable[..., Done]


def of_process(done: subprocess.CompletedProcess[str]) -> Done:
    return Done(done.returncode, done.stdout, done.stderr)
