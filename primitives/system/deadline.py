"""A deadline for nested waits. A wait that it ends must also end its child process.

Standard library only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_until = ContextVar("deadline", default=math.inf)


class Late(Exception):
    """The deadline has passed: no result, and no verdict."""


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Make waits and loops in the block raise Late at this moment of ``time.monotonic``; None: never."""
    token = _until.set(math.inf if moment is None else moment)
    try:
        check()
        yield
    finally:
        _until.reset(token)


def within(seconds: float) -> float:
    """The end of a wait of this many seconds: the deadline, if that is earlier."""
    return min(time.monotonic() + seconds, _until.get())


def check(moment: float | None = None) -> None:
    """Raise Late past the deadline, or if the deadline cut short a wait until ``moment``."""
    if (time.monotonic() if moment is None else moment) >= _until.get():
        raise Late
