"""The project's folders, the cache, and atomic file writes. It imports only the standard library."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]  # the checkout, or the installed package
SPECS, KERNELS = ROOT / "specs", ROOT / "generated_kernels"


def cache_dir() -> Path:
    """The folder for lowered code, reports and tunings: CODA_AGENT_CACHE or ~/.cache/coda-agent."""
    return Path(os.environ.get("CODA_AGENT_CACHE") or Path.home() / ".cache" / "coda-agent")


class CacheError(OSError):
    """The cache folder cannot be written."""


def usable_cache() -> Path:
    """Return ``cache_dir()``, and create the folder if it is missing. Raises CacheError if the folder is not
    writable."""
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
        why = "you may not write to it"
    except FileExistsError:
        why = "it is not a folder"
    except OSError as error:
        why = str(error.strerror)
    raise CacheError(f"the cache {path} cannot be written ({why}): set CODA_AGENT_CACHE to another folder")


def parse(text: str | bytes) -> Any:
    """Parse untrusted JSON. Raises ValueError for invalid JSON, or JSON that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json(path: Path, read: Callable[[Any], Any] = lambda value: value) -> Any:
    """Parse a JSON file of the cache, and convert the value by ``read``. Return None if the file is missing
    or damaged, which includes a value that ``read`` cannot convert."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return read(parse(content))
    except Exception:  # a value of another form can raise anything
        return None


def cached_json(kind: str, key: str, make: Callable[[], str], read: Callable[[Any], T]) -> T:
    """Return the cached JSON value of this kind and key, converted by ``read``. If the value is missing or
    damaged, compute it with ``make`` and cache it. Raises CacheError, and the exceptions of ``make``."""
    path = usable_cache() / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    value: T | None = read_json(path, read)
    if value is None:
        text = make()
        write_atomic(path, text)
        value = read(json.loads(text))
    return value


def regular(path: Path) -> Path:
    """Return the path. Raises OSError if it is a device or a pipe, because reading it may never end, and
    because ``write_atomic`` would replace it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "is a device or a pipe", str(path))
    return path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) atomically and durably.

    Creates the file's directory if it is missing. If writing fails, or if the path is a device or a pipe,
    raises OSError and leaves the old contents.
    """
    regular(path).parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        draft.unlink(missing_ok=True)
        # Without O_EXCL, open would follow a symbolic link that another user placed at the temporary file's
        # path.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
