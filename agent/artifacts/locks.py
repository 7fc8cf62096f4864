"""Locks on directories. The kernel drops a lock when its holder dies, and no lock file appears among people's
files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Within, no other process of ours is ``alone`` or ``together`` with others there. Raises OSError."""
    with _locked(directory, fcntl.LOCK_EX):
        yield


@contextmanager
def together(directory: Path) -> Iterator[None]:
    """Within, no process of ours is ``alone`` there; other readers may be. Raises OSError."""
    with _locked(directory, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    # the directory itself: files in it are replaced, and a lock on one with them
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
