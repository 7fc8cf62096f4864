"""Make this package importable as ``primitives``, the name that kernel files and lowered texts use.

Reports contain hashes of kernel files and lowered texts, so the import statements in these files must not
change. The name ``primitives`` refers to this package only while such a file loads, because a user may have
another module of that name. Device code is always imported under the name ``primitives.device``.
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
    """Within the ``with`` block, ``primitives`` means ``coda_agent.primitives``."""
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
    """Import a device module, such as ``mainloop``."""
    with frozen_names():
        return importlib.import_module(f"primitives.device.{module}")
