"""Room on the disk for one event of a journal, taken before the event is produced.

What was asked for is paid for, and a disk may fill up between the request and its answer. So blocks are
allocated beforehand, in a file beside the journal: an event that the journal has no room for is written over
them, which takes no more, and is put into the journal when that is next opened.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from coda_agent.primitives.system.files import sync_directory

BYTES = 4 << 20  # the longest answers, their tools' inputs twice, are a quarter of it


class Room:
    """The file at ``path``: blocks alone, or an event kept in them. It is there while a process produces."""

    def __init__(self, path: Path):
        self.path = path

    def take(self) -> None:
        """Allocate the blocks, where they are not. Raises OSError on a disk that has too few."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size >= BYTES:
                return
            os.posix_fallocate(descriptor, 0, BYTES)
            os.fsync(descriptor)
        except OSError:
            self.give_back()
            raise
        finally:
            os.close(descriptor)
        sync_directory(self.path.parent)

    def keep(self, event: str) -> None:
        """Write an event over the blocks, durably. Raises OSError."""
        body = event.encode()
        with self.path.open("r+b", buffering=0) as file:
            line = f"{hashlib.sha256(body).hexdigest()} {len(body)}\n".encode() + body
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())

    def kept(self) -> str | None:
        """The event, if one is kept; a kill while it was written leaves none. Raises OSError."""
        try:
            with self.path.open("rb") as file:
                digest, _, length = file.readline(128).decode("ascii", "replace").partition(" ")
                body = file.read(int(length)) if length.strip().isdecimal() else b""
        except FileNotFoundError:
            return None
        return body.decode() if hashlib.sha256(body).hexdigest() == digest else None

    def give_back(self) -> None:
        """Remove it, with what is kept in it."""
        with suppress(FileNotFoundError):
            self.path.unlink()
