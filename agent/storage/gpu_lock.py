"""Lock a GPU, so that only one command at a time measures on that GPU. Concurrent commands would slow each
other down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from coda_agent.primitives.system.files import cache_dir
from coda_agent.verifier.gpu.visible import visible_gpus

SAYING = 60.0  # seconds between two messages of a waiting command


@contextmanager
def gpu_alone(say: Callable[[str], object], deadline: float | None = None) -> Iterator[None]:
    """Lock this process's first GPU against other measuring commands of the same user. While another command
    holds the lock, wait, and report the wait to ``say`` at intervals. Raises filelock's Timeout if the other
    command still holds the lock at ``deadline`` (by ``time.monotonic``)."""
    lock = FileLock(cache_dir() / f"{_first_gpu()}.lock")
    wait = 0.0
    while True:
        try:
            lock.acquire(timeout=wait)
            break
        except Timeout:
            left = SAYING if deadline is None else min(SAYING, deadline - time.monotonic())
            if wait and left <= 0:
                raise
            say("another command is measuring on this GPU; waiting for it")
            wait = max(left, 0.001)
    try:
        yield
    finally:
        lock.release()


def _first_gpu() -> str:
    """The UUID of this process's first GPU; "gpu" if no GPU is visible."""
    gpus = visible_gpus()
    return gpus[0].uuid if gpus else "gpu"
