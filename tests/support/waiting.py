"""Wait in tests by counting sleeps, not by the clock. On a machine that was paused, the clock jumps while
processes make no progress."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP = 0.02  # seconds between two checks


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return whether the condition becomes true within ``seconds`` of sleeping."""
    for _ in range(round(seconds / STEP)):
        if condition():
            return True
        time.sleep(STEP)
    return condition()
