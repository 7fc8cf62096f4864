"""A separate file system, if this user may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(disk: Path, size: int) -> Iterator[Path]:
    """Create a directory, and mount a file system of ``size`` bytes on it if this user may. Tests call
    ``os.path.ismount`` to see whether it is mounted."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    may = not os.geteuid() and shutil.which("mount") is not None
    done = may and not subprocess.run(command, capture_output=True).returncode
    try:
        yield disk
    finally:
        if done:
            subprocess.run(["umount", str(disk)], check=True)
