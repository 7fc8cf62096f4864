"""A jailed child that has been taken over, and a check that nothing is left when a child has ended."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# There is no language check: ``trace`` executes the source with every builtin. It sends the source's
# ``answer`` or, without an answer, an error with ``said``. Only the operating system and the parent can stop
# the source.
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
    """Return the ids of this process's children, zombies included."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(number) for each in lists for number in each.read_text().split()}


@contextmanager
def nothing_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process work, and keep temporary files, in ``directory``. Check that the ``with`` block
    leaves no process, descriptor or file."""
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.chdir(directory)
    processes, descriptors = children(), set(os.listdir("/proc/self/fd"))
    yield
    assert children() <= processes
    # No descriptors are new. There may be fewer than before, if a server thread of earlier tests closes its
    # connections.
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert list(directory.iterdir()) == []
