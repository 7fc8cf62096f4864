"""The name ``primitives``, which kernel files and lowered texts import from.

Their bytes are evidence and keep that name. It stands for this package only while one of them is loaded, so
that no user's own ``primitives`` is touched. Device code is never imported by another name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType

_lock = RLock()


@contextmanager
def frozen_names() -> Iterator[None]:
    """Within, ``primitives`` is ``coda_agent.primitives``."""
    with _lock:
        before = sys.modules.get("primitives")
        sys.modules["primitives"] = sys.modules[__package__]
        try:
            yield
        finally:
            if before is None:
                del sys.modules["primitives"]
            else:
                sys.modules["primitives"] = before


def device(module: str) -> ModuleType:
    """A module of device code, such as ``mainloop``."""
    with frozen_names():
        return importlib.import_module(f"primitives.device.{module}")
