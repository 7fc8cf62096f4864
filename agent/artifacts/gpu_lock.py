"""Lock this machine's GPU: one command measures at a time, since concurrent commands would slow each
other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from coda_agent.primitives.system.files import cache_dir


@contextmanager
def gpu_alone(say: Callable[[str], object], deadline: float | None = None) -> Iterator[None]:
    """Exclude other measuring commands of this user. Waits for a running one, and tells ``say``. Raises
    filelock's Timeout if it still runs at ``deadline``, a moment of ``time.monotonic``."""
    lock = FileLock(cache_dir() / "gpu.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another command is measuring on this GPU; waiting for it")
        lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic()))
    try:
        yield
    finally:
        lock.release()
