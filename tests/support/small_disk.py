"""Mount a separate, small file system for a test, if this user may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(disk: Path, size: int) -> Iterator[Path]:
    """Create the directory ``disk``, and yield it. If this user may mount file systems, mount one of ``size``
    bytes on the directory. Tests call ``os.path.ismount`` to see whether a file system is mounted."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    may = not os.geteuid() and shutil.which("mount") is not None
    done = may and not subprocess.run(command, capture_output=True).returncode
    try:
        yield disk
    finally:
        if done:
            subprocess.run(["umount", str(disk)], check=True)
