"""A deadline for nested waits. A wait that the deadline cuts short must also end the child process it waited
for.

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
    """Make waits and loops in the with block raise Late at this ``moment`` of ``time.monotonic``; with None
    they never do."""
    token = _until.set(math.inf if moment is None else moment)
    try:
        check()
        yield
    finally:
        _until.reset(token)


def within(seconds: float) -> float:
    """The moment when a wait of this many seconds ends, or the deadline if that is earlier."""
    return min(time.monotonic() + seconds, _until.get())


def check(moment: float | None = None) -> None:
    """Raise Late if the deadline has passed. With ``moment``, the planned end of a wait, raise Late if the
    deadline cut the wait short."""
    if (time.monotonic() if moment is None else moment) >= _until.get():
        raise Late
