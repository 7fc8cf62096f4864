"""Lock directories. The operating system releases a lock when its process dies, and no lock file remains
among a user's files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def alone(directory: Path) -> AbstractContextManager[None]:
    """Lock the directory exclusively: no other process can lock it, ``alone`` or ``together``. Raises
    OSError."""
    return _locked(directory, fcntl.LOCK_EX)


def together(directory: Path) -> AbstractContextManager[None]:
    """Take a shared lock on the directory: other processes may hold it ``together``, but none ``alone``.
    Raises OSError."""
    return _locked(directory, fcntl.LOCK_SH)


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    # Lock the directory itself, because a lock on a file is lost when the file is replaced.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
