"""The moment from which nobody wants a result any more: what waits for a child's answer ends the child then.

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
    """The time is up: no result, and no verdict either."""


@contextmanager
def until(moment: float | None) -> Iterator[None]:
    """Within: what waits or repeats here raises Late at this moment of ``time.monotonic``; None: never."""
    token = _until.set(math.inf if moment is None else moment)
    try:
        check()
        yield
    finally:
        _until.reset(token)


def within(seconds: float) -> float:
    """The moment at which a wait of so many seconds ends: the deadline, if that is earlier."""
    return min(time.monotonic() + seconds, _until.get())


def check(moment: float | None = None) -> None:
    """Raise Late from the deadline on, or where a wait ended by it: at a ``moment`` that ``within`` gave."""
    if (time.monotonic() if moment is None else moment) >= _until.get():
        raise Late
