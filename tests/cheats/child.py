"""A jailed child that has been taken over, and what must not be left once one is gone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# The language check is gone: ``trace`` executes the source with every builtin, and sends back its ``answer``,
# or what it leaves in ``said``. What stops it then is the operating system and the parent.
BARE = """
import sys; sys.path.append(sys.argv[1])
import ctypes, errno, mmap, resource, signal, socket, time
from coda_agent.primitives.system import sandbox
from coda_agent.verifier.sandbox import jail_child
def bare(source, signature):
    names = {}
    exec(source, names)
    return names.get("answer") or {"error": {"code": "said", "message": str(names.get("said")), "line": None}}
jail_child.trace = bare
def without(*names):
    def refuse(): raise OSError("not here")
    sandbox.LAYERS = tuple((n, refuse if n in names else f) for n, f in sandbox.LAYERS)
"""
TAKEN_OVER = f"{BARE}\njail_child.main()"


def children() -> set[int]:
    """Process ids whose parent we are, zombies included."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(number) for each in lists for number in each.read_text().split()}


@contextmanager
def nothing_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, we work and keep temporary files in ``directory``: no process, descriptor or file stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.chdir(directory)
    processes, descriptors = children(), set(os.listdir("/proc/self/fd"))
    yield
    assert children() <= processes
    # None more: fewer there may be, when a server thread of tests before these lets its connections go.
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert list(directory.iterdir()) == []
