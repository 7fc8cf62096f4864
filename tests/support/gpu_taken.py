"""Simulate that another command measures on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from filelock import FileLock

from coda_agent.primitives.system.files import cache_dir


@contextmanager
def gpu_taken(monkeypatch: pytest.MonkeyPatch, begun: Callable[[], object]) -> Iterator[list[bool]]:
    """Hold the GPU's lock until the command under test waits for this lock. Yield a list, to which each wait
    adds an entry. The entry is true if the command had already begun to measure, as ``begun()`` tells."""
    lock = FileLock(cache_dir() / "gpu.lock")
    waited: list[bool] = []

    class Waiting(FileLock):
        def acquire(self, timeout: float | None = None, *given: Any, **more: Any) -> Any:
            if timeout:  # the command has already tried once without waiting
                waited.append(bool(begun()))
                lock.release()
            return super().acquire(timeout, *given, **more)

    monkeypatch.setattr("coda_agent.agent.storage.gpu_lock.FileLock", Waiting)
    with lock:
        yield waited
    with FileLock(cache_dir() / "gpu.lock", timeout=0):  # check that the lock is free again
        pass
