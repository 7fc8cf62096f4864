"""One deadline for all waits within a ``with`` block, including waits in called functions. If the deadline
ends a wait for a child process, the waiting code must also kill the child.

This module imports only the standard library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_until = ContextVar("deadline", default=math.inf)


class Late(Exception):
    """The deadline has passed, so there is no result and no verdict."""


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Within the ``with`` block, waits and loops raise Late at this ``moment`` of ``time.monotonic``. None
    means never."""
    token = _until.set(math.inf if moment is None else moment)
    try:
        check()
        yield
    finally:
        _until.reset(token)


def within(seconds: float) -> float:
    """The moment at which a wait of this many seconds ends, or the deadline, whichever is earlier."""
    return min(time.monotonic() + seconds, _until.get())


def check(moment: float | None = None) -> None:
    """Raise Late if a wait until ``moment`` would reach the deadline. Without ``moment``, raise Late if the
    deadline has passed."""
    if (time.monotonic() if moment is None else moment) >= _until.get():
        raise Late
