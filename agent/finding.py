"""A finding of ``coda-agent doctor``, and a check that a command is installed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from coda_agent.primitives.system.subprocesses import output


@dataclass(frozen=True)
class Finding:
    """One finding of doctor. ``remedy`` is empty if, and only if, ``status`` is ok."""

    name: str
    status: Literal["ok", "missing", "broken"]
    detail: str
    remedy: str = ""


def version_text(path: str) -> str:
    """The text that a command prints for ``--version``. Raises OSError and SubprocessError."""
    return output(path, "--version", seconds=20).strip()


def program(name: str, command: str, without: str, install: str, reinstall: str) -> Finding:
    """Check that a command is on PATH and prints its version. ``without``: what a user cannot do without the
    command. ``install``: the remedy if the command is missing. ``reinstall``: the remedy if the command
    fails."""
    path = shutil.which(command)
    if path is None:
        return Finding(name, "missing", f"not on PATH: {without}", install)
    try:
        return Finding(name, "ok", version_text(path))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name, "broken", f"{path}: {error}", reinstall)
