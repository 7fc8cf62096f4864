"""Waiting in tests, by counted waits: a paused machine's clock jumps although nothing else has moved."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP = 0.02  # seconds between two looks


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition comes true within this many seconds of waiting."""
    for _ in range(round(seconds / STEP)):
        if condition():
            return True
        time.sleep(STEP)
    return condition()
