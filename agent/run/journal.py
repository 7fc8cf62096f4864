"""The durable record of a run: each step is produced once, committed, and read back ever after.

A run is a sequence of keyed steps. `Journal.once` returns what a key recorded, or produces it and commits it
to disk before it returns: after a crash, a kill or a power cut the run starts again from the top and is soon
where it was, without asking (and paying) for an answer twice. Only a step that was under way is repeated.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from coda_agent.primitives.errors import Absent, InvalidInput
from coda_agent.primitives.system.files import parse, sync_directory

__all__ = [
    *("DamagedError", "Event", "Journal", "JournalError", "Record", "Snapshot"),
    *("GPU_SECONDS", "glance", "held", "read_export"),
]

SCHEMA = 1
GPU_SECONDS = "gpu_seconds"  # in an event of a measurement made here: what that piece of it took
_APPLICATION = 0x434F4441  # "CODA" in the file's header: tells a journal from other SQLite files

_TABLES = f"""
PRAGMA journal_mode = OFF;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {SCHEMA};
PRAGMA synchronous = FULL;
BEGIN;
CREATE TABLE header (json TEXT NOT NULL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    payload TEXT NOT NULL, time TEXT NOT NULL
);
COMMIT;
"""


class JournalError(Absent):
    """A journal or an export that cannot be used: the message names the file and what to do."""


class DamagedError(JournalError):
    """A journal that is there and says what none of ours would."""

    exit_status = InvalidInput.exit_status


@dataclass(frozen=True)
class Event:
    """One committed step; `time` is when it was committed, ISO 8601 in UTC."""

    seq: int
    key: str
    kind: str
    payload: dict[str, Any]
    time: str


class Record(ABC):
    """A run's header and events, to be read."""

    header: dict[str, Any]

    @abstractmethod
    def events(self) -> list[Event]:
        """All committed events, in the order of their commits."""

    def export(self, header: dict[str, Any] | None = None, leaving_out: Collection[str] = ()) -> str:
        """The run as JSON lines, its header (or the one given) first, without events of some kinds."""
        lines = [json.dumps({"coda_agent_journal": SCHEMA, "header": header or self.header})]
        lines += [json.dumps(asdict(event)) for event in self.events() if event.kind not in leaving_out]
        return "\n".join(lines) + "\n"


class Snapshot(Record):
    """A journal as it was committed at one moment."""

    def __init__(self, header: dict[str, Any], events: list[Event]):
        self.header, self._events = header, events

    def events(self) -> list[Event]:
        return self._events


class Journal(Record):
    """One run's journal, open for this process alone; `create` or `open` one, and close it."""

    def __init__(self, path: Path, lock: FileLock, connection: sqlite3.Connection):
        self.path = path
        self._lock = lock
        self._db = connection
        self.header = _header(path, self._rows(_HEADER))

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> Journal:
        """A new journal; makes the directory. Raises JournalError where one exists or cannot be written."""
        with ExitStack() as undo:
            lock = _lock(path)
            undo.callback(lock.release)
            _refuse_leftovers(path)
            _write_empty(path, header)
            return cls._open_locked(path, lock, undo)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """An existing journal. Raises JournalError if it is missing, damaged, in use or of another schema."""
        if not path.is_file():
            raise JournalError(f"{path}: there is no journal; check the run's name, or start a new run")
        with ExitStack() as undo:
            lock = _lock(path)
            undo.callback(lock.release)
            return cls._open_locked(path, lock, undo)

    @classmethod
    def _open_locked(cls, path: Path, lock: FileLock, undo: ExitStack) -> Journal:
        with _explained(path):
            # never create a file here; autocommit: an INSERT is its own transaction, on disk when it returns
            uri = f"{path.absolute().as_uri()}?mode=rw"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None)
            undo.callback(connection.close)
            _check(path, connection)  # first: the next line would convert a stranger's file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        journal = cls(path, lock, connection)
        undo.pop_all()
        return journal

    def once(self, key: str, kind: str, produce: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `key` recorded, or what `produce` returns now, committed to disk before this returns.

        The payload is a JSON object and comes back as JSON made it (tuples are lists), the first time too.
        If `produce` raises, nothing is recorded. Raises ValueError when `key` was recorded as another kind,
        and JournalError when the event cannot be written, as on a full disk.
        """
        rows = self._rows("SELECT kind, payload FROM events WHERE key = ?", key)
        if not rows:
            text = json.dumps(produce())
            insert = "INSERT INTO events (key, kind, payload, time) VALUES (?, ?, ?, ?)"
            self._rows(insert, key, kind, text, _now())
            return self._load(text)
        recorded, text = rows[0]
        if recorded != kind:
            raise ValueError(f"step {key!r} is recorded as {recorded!r}, not as {kind!r}")
        return self._load(text)

    def events(self) -> list[Event]:
        return [_event(self.path, row) for row in self._rows(_EVENTS, 0)]

    def close(self) -> None:
        """Give the journal free for others. Harmless when it is closed already."""
        self._db.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rows(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        with _explained(self.path):
            return self._db.execute(statement, values).fetchall()

    def _load(self, text: str) -> dict[str, Any]:
        return _load(self.path, text)


def glance(path: Path, after: int = 0) -> tuple[dict[str, Any], list[Event]]:
    """Header and events of a journal that another process may have open, as committed at this moment;
    changes nothing. ``after``: the last event that was read at an earlier glance, which found the file
    sound. Raises JournalError as ``Journal.open``."""
    if not path.is_file():
        raise JournalError(f"{path}: there is no journal; check the run's name")
    with _explained(path):
        try:
            return _read(path, f"{path.absolute().as_uri()}?mode=ro", after)
        except sqlite3.OperationalError as error:
            if _code(error) not in _UNWRITABLE:
                raise
            return _read_aside(path, after, error)


# SQLite's errors where it cannot make the index (-shm) that reading takes beside a journal.
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)


def _read(path: Path, uri: str, after: int) -> tuple[dict[str, Any], list[Event]]:
    """The journal at ``uri``, which is the one at ``path`` or a copy of it."""
    with closing(sqlite3.connect(uri, uri=True)) as db:
        if not after:  # it reads the whole file
            _check(path, db)
        header = db.execute(_HEADER).fetchall()
        rows = db.execute(_EVENTS, (after,)).fetchall()
    return _header(path, header), [_event(path, row) for row in rows]


def _read_aside(path: Path, after: int, why: Exception) -> tuple[dict[str, Any], list[Event]]:
    """On a disk that is full or cannot be written: what a clean end left is whole, and takes no index; else
    a copy is read that has the log beside it."""
    log = path.with_name(path.name + "-wal")
    try:
        if not log.exists() or not log.stat().st_size:
            return _read(path, f"{path.absolute().as_uri()}?mode=ro&immutable=1", after)
        with tempfile.TemporaryDirectory(prefix="coda-agent-") as scratch:
            for file in (path, log):
                shutil.copyfile(file, Path(scratch) / file.name)
            return _read(path, f"{(Path(scratch) / path.name).as_uri()}?mode=ro", after)
    except (sqlite3.OperationalError, OSError) as error:
        remedy = "make room on its disk, or set TMPDIR to a directory that has room"
        raise JournalError(
            f"{path}: cannot be read where it is ({why}), nor from a copy ({error}); {remedy}"
        ) from error


def held(path: Path) -> bool:
    """Whether a living process has this journal open. Takes nothing from it."""
    try:
        lock = os.open(_lock_of(path), os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that two who ask do not take each other for an owner; `_lock` waits for those who ask.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError | PermissionError)  # what a lock that is held gives
    finally:
        os.close(lock)
    return False


_HEADER = "SELECT json FROM header"
_EVENTS = "SELECT seq, key, kind, payload, time FROM events WHERE seq > ? ORDER BY seq"


def _header(path: Path, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    if len(rows) != 1:
        raise DamagedError(f"{path}: it has {len(rows)} headers, not one; {_DAMAGED}")
    return _load(path, rows[0][0])


def _event(path: Path, row: tuple[Any, ...]) -> Event:
    seq, key, kind, payload, time = row
    if not all(isinstance(value, str) for value in (key, kind, time)):
        raise DamagedError(f"{path}: event {seq}: its key, kind or time is no text; {_DAMAGED}")
    return Event(seq, key, kind, _load(path, payload), time)


def _load(path: Path, text: object) -> dict[str, Any]:
    """A JSON object. SQLite gives whatever a damaged record holds."""
    try:
        found = parse(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DamagedError(f"{path}: a record is damaged ({error}); {_DAMAGED}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: a record is damaged (it is no JSON object); {_DAMAGED}")
    return found


def read_export(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """Header and events of a journal's export. Raises JournalError naming file and line of what is wrong."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}; check the file's name") from error
    first, *rest = [(number, line) for number, line in enumerate(lines, 1) if line.strip()] or [(1, b"")]
    header = _parse(path, *first, {"coda_agent_journal": int, "header": dict})
    if header["coda_agent_journal"] != SCHEMA:
        found = header["coda_agent_journal"]
        raise DamagedError(f"{path}:{first[0]}: schema {found}, this version reads {SCHEMA}; export it anew")
    return header["header"], [Event(**_parse(path, number, line, _EVENT)) for number, line in rest]


_EVENT: dict[str, type] = {"seq": int, "key": str, "kind": str, "payload": dict, "time": str}
_DAMAGED = "restore it from a copy, or start a new run"


def _parse(path: Path, number: int, line: bytes, fields: dict[str, type]) -> dict[str, Any]:
    """One line of an export with just these fields."""
    try:
        data = parse(line)
    except ValueError as error:  # UnicodeDecodeError too
        raise DamagedError(f"{path}:{number}: not a line of JSON ({error}); export the run again") from None
    if not isinstance(data, dict) or data.keys() != fields.keys():
        wanted = ", ".join(fields)
        raise DamagedError(f"{path}:{number}: needs an object with just {wanted}; export the run again")
    for name, kind in fields.items():
        if type(data[name]) is not kind:
            raise DamagedError(f"{path}:{number}: {name!r} must be {kind.__name__}, not {data[name]!r}")
    return data


def _lock(path: Path) -> FileLock:
    """Held by the one process that has the journal open; the kernel drops it when that process dies."""
    lock = FileLock(_lock_of(path), thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_ASKED, poll_interval=_ASKED / 20)
    except Timeout:
        raise JournalError(f"run {path} is in use by another process; wait or stop it") from None
    except OSError as error:
        remedy = "choose a directory that can be made and written"
        raise JournalError(f"{path}: {error.strerror}; {remedy}") from error
    return lock


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


_ASKED = 0.2  # seconds: longer than any `held` keeps the lock from who opens the journal


def _refuse_leftovers(path: Path) -> None:
    if path.exists():
        raise JournalError(f"{path}: this run exists; resume it, or choose another name")
    wal = path.with_name(path.name + "-wal")
    if wal.exists():  # SQLite would replay another journal's pages into the new one
        remedy = "remove it too, or choose another name"
        raise JournalError(f"{wal}: left over from a journal that was removed; {remedy}")


def _write_empty(path: Path, header: dict[str, Any]) -> None:
    """Put a complete journal without events at `path`, by a rename: a kill leaves none, never half of one."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    text = json.dumps(header)
    try:
        with _explained(path), closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            connection.executescript(_TABLES)
            connection.execute("INSERT INTO header VALUES (?)", (text,))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def _check(path: Path, connection: sqlite3.Connection) -> None:
    """Raises JournalError unless this is a sound journal of our schema."""
    application, schema, health = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "quick_check")
    )
    if application != _APPLICATION:
        raise DamagedError(f"{path}: an SQLite file, but no journal of coda-agent; check the run's name")
    if schema != SCHEMA:
        raise JournalError(
            f"{path}: of schema {schema}, this version reads {SCHEMA}; use the coda-agent that wrote it"
        )
    if health != "ok":
        raise DamagedError(f"{path}: damaged ({' '.join(health.split())}); {_DAMAGED}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors as JournalError, with a remedy."""
    try:
        yield
    except sqlite3.ProgrammingError:  # our own bug
        raise
    except UnicodeDecodeError as error:  # SQLite quotes the file in what it finds wrong with it
        raise DamagedError(f"{path}: damaged ({error.reason}); {_DAMAGED}") from error
    except sqlite3.DatabaseError as error:
        code = _code(error)
        if code == sqlite3.SQLITE_FULL:
            remedy = "free space on that disk and resume; what was committed is safe"
        elif isinstance(error, sqlite3.OperationalError) and code not in _WRONG:
            remedy = "check that the file can be read and written, then resume; what was committed is safe"
        else:
            raise DamagedError(f"{path}: {error}; {_DAMAGED}") from error
        raise JournalError(f"{path}: {error}; {remedy}") from error


# SQLite's errors for a file that is there and says something else: no table of ours, text that is no UTF-8.
_WRONG = (None, sqlite3.SQLITE_ERROR)


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary code; None for what Python itself found wrong."""
    code = getattr(error, "sqlite_errorcode", None)
    return code if code is None else code & 0xFF


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
