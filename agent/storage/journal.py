"""The durable record of a run, from which an interrupted run can continue.

In this module a step is a piece of a run's work, for example a request for an answer. Each step has a key. If
the result of a key is recorded, `Journal.once` returns this result. Otherwise `once` executes the step and
commits its result to disk. After a crash or power cut the run starts from the top and reads back the recorded
results, so it never pays twice for an answer. Only the step in progress is repeated.
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
from typing import Any

from filelock import FileLock, Timeout

from coda_agent.primitives.errors import Absent, InvalidInput
from coda_agent.primitives.system.files import parse, sync_directory

SCHEMA = 1
GPU_SECONDS = "gpu_seconds"  # the field of an event with the GPU seconds that a measurement used
_APPLICATION = 0x434F4441  # "CODA", which marks the header of a journal's SQLite file

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
    """A journal or an export is unusable. The message names the file and the remedy."""


class DamagedError(JournalError):
    """The journal exists, but its contents are invalid."""

    exit_status = InvalidInput.exit_status


@dataclass(frozen=True)
class Event:
    """One committed step. `time`: the time of the commit, in ISO 8601 and UTC."""

    seq: int
    key: str
    kind: str
    payload: dict[str, Any]
    time: str


class Record(ABC):
    """The header and events of a run, read-only."""

    header: dict[str, Any]

    @abstractmethod
    def events(self) -> list[Event]:
        """All committed events, in commit order."""

    def export(self, header: dict[str, Any] | None = None, leaving_out: Collection[str] = ()) -> str:
        """The run as JSON lines: the header, then the events. ``header`` replaces the run's own header.
        Events of the kinds in ``leaving_out`` are left out."""
        lines = [json.dumps({"coda_agent_journal": SCHEMA, "header": header or self.header})]
        lines += [json.dumps(asdict(event)) for event in self.events() if event.kind not in leaving_out]
        return "\n".join(lines) + "\n"


class Snapshot(Record):
    """The header and events of a journal at one moment."""

    def __init__(self, header: dict[str, Any], events: list[Event]):
        self.header, self._events = header, events

    def events(self) -> list[Event]:
        return self._events


class Journal(Record):
    """One run's journal, locked by this process. `create` and `open` return a journal; close it after use."""

    def __init__(self, path: Path, lock: FileLock, connection: sqlite3.Connection):
        self.path = path
        self._lock = lock
        self._db = connection
        self.header = _header(path, self._rows(_HEADER))

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> Journal:
        """Create a journal and its directory. Raises JournalError if the journal exists or the directory
        cannot be written."""
        with ExitStack() as undo:
            lock = _lock(path)
            undo.callback(lock.release)
            _refuse_leftovers(path)
            _write_empty(path, header)
            return cls._open_locked(path, lock, undo)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open an existing journal. Raises JournalError if the journal is missing, damaged, in use or of
        another schema."""
        if not path.is_file():
            raise JournalError(f"{path}: no journal here; check the run's name, or start a new run")
        with ExitStack() as undo:
            lock = _lock(path)
            undo.callback(lock.release)
            return cls._open_locked(path, lock, undo)

    @classmethod
    def _open_locked(cls, path: Path, lock: FileLock, undo: ExitStack) -> Journal:
        with _explained(path):
            # mode=rw never creates a file; with autocommit, each INSERT is on disk when its call returns
            uri = f"{path.absolute().as_uri()}?mode=rw"
            # threads may share a journal if they take turns
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            undo.callback(connection.close)
            _check(path, connection)  # check first, because the next line would modify even an unrelated file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        journal = cls(path, lock, connection)
        undo.pop_all()
        return journal

    def once(self, key: str, kind: str, produce: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the recorded result of `key`. If no result is recorded, call `produce`, commit its result to
        disk and return this result.

        A result is a JSON object. Even the first call returns the result as JSON represents it, so tuples
        become lists. If `produce` raises, nothing is recorded. Raises ValueError if the recorded result has
        another kind. Raises JournalError if the event cannot be written, for example on a full disk.
        """
        rows = self._rows(_EVENT_OF, key)
        if not rows:
            text = json.dumps(produce())
            insert = "INSERT INTO events (key, kind, payload, time) VALUES (?, ?, ?, ?)"
            self._rows(insert, key, kind, text, _now())
            return self._load(text)
        recorded, text = rows[0]
        if recorded != kind:
            raise ValueError(f"step {key!r} is recorded as {recorded!r}, not {kind!r}")
        return self._load(text)

    def get(self, key: str) -> dict[str, Any] | None:
        """The recorded result of `key`, or None."""
        rows = self._rows(_EVENT_OF, key)
        return self._load(rows[0][1]) if rows else None

    def events(self) -> list[Event]:
        return [_event(self.path, row) for row in self._rows(_EVENTS, 0)]

    def close(self) -> None:
        """Close the journal and release its lock. A second call does nothing."""
        self._db.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, statement: str, *values: str | int) -> list[tuple[Any, ...]]:
        with _explained(self.path):
            return self._db.execute(statement, values).fetchall()

    def _load(self, text: str) -> dict[str, Any]:
        return _load(self.path, text)


def glance(path: Path, after: int = 0) -> tuple[dict[str, Any], list[Event]]:
    """Read the header and events of a journal that another process may have open. Changes nothing. ``after``:
    the number of the last event that an earlier read returned, so that only later events are returned; 0
    returns all events. Raises JournalError as ``Journal.open`` does."""
    with _explained(path):
        if not path.is_file():
            raise JournalError(f"{path}: no journal here; check the run's name")
        try:
            return _read(path, f"{path.absolute().as_uri()}?mode=ro", after)
        except sqlite3.OperationalError as error:
            if _code(error) not in _UNWRITABLE:
                raise
            return _read_aside(path, after, error)


# the errors that SQLite raises if it cannot create its index file (-shm) next to a journal
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)


def _read(path: Path, uri: str, after: int) -> tuple[dict[str, Any], list[Event]]:
    """Read the journal at ``uri``, which is ``path`` or a copy of it."""
    with closing(sqlite3.connect(uri, uri=True)) as db:
        if not after:  # only on a first read, because the check reads the whole file
            _check(path, db)
        header = db.execute(_HEADER).fetchall()
        rows = db.execute(_EVENTS, (after,)).fetchall()
    return _header(path, header), [_event(path, row) for row in rows]


def _read_aside(path: Path, after: int, why: Exception) -> tuple[dict[str, Any], list[Event]]:
    """Read a journal on a disk that is full or read-only. If the last writer closed the journal, the
    journal's file is complete and needs no index. Otherwise read a copy of the file and of its log (-wal)."""
    log = path.with_name(path.name + "-wal")
    try:
        if not log.exists() or not log.stat().st_size:
            return _read(path, f"{path.absolute().as_uri()}?mode=ro&immutable=1", after)
        with tempfile.TemporaryDirectory(prefix="coda-agent-") as scratch:
            for file in (path, log):
                shutil.copyfile(file, Path(scratch) / file.name)
            return _read(path, f"{(Path(scratch) / path.name).as_uri()}?mode=ro", after)
    except (sqlite3.OperationalError, OSError) as error:
        remedy = "free space on its disk, or set TMPDIR to a directory with free space"
        raise JournalError(
            f"{path}: cannot be read in place ({why}) or from a copy ({error}); {remedy}"
        ) from error


def is_open(path: Path) -> bool:
    """Whether a living process has this journal open. The check does not disturb that process's lock."""
    try:
        lock = os.open(_lock_of(path), os.O_RDONLY)
    except OSError:
        return False
    try:
        # A check takes a shared lock, so that two checks at the same time do not mistake each other for the
        # journal's owner. `_lock` waits until all checks have ended.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # the errors for a lock that another process holds
        return isinstance(error, BlockingIOError | PermissionError)
    finally:
        os.close(lock)
    return False


_HEADER = "SELECT json FROM header"
_EVENT_OF = "SELECT kind, payload FROM events WHERE key = ?"
_EVENTS = "SELECT seq, key, kind, payload, time FROM events WHERE seq > ? ORDER BY seq"


def _header(path: Path, rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    if len(rows) != 1:
        raise DamagedError(f"{path}: has {len(rows)} headers instead of one; {_DAMAGED}")
    return _load(path, rows[0][0])


def _event(path: Path, row: tuple[Any, ...]) -> Event:
    seq, key, kind, payload, time = row
    if not all(isinstance(value, str) for value in (key, kind, time)):
        raise DamagedError(f"{path}: event {seq}: key, kind or time is not text; {_DAMAGED}")
    return Event(seq, key, kind, _load(path, payload), time)


def _load(path: Path, text: object) -> dict[str, Any]:
    """Parse a JSON object. In a damaged record, ``text`` can be any value."""
    try:
        found = parse(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DamagedError(f"{path}: a record is damaged ({error}); {_DAMAGED}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: a record is damaged (not a JSON object); {_DAMAGED}")
    return found


def read_export(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """Read the header and events of an exported journal. Raises JournalError with the file and line of the
    fault."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}; check the file's name") from error
    first, *rest = [(number, line) for number, line in enumerate(lines, 1) if line.strip()] or [(1, b"")]
    header = _parse(path, *first, {"coda_agent_journal": int, "header": dict})
    if header["coda_agent_journal"] != SCHEMA:
        found = header["coda_agent_journal"]
        raise DamagedError(f"{path}:{first[0]}: schema {found}, not {SCHEMA}; export the run again")
    return header["header"], [Event(**_parse(path, number, line, _EVENT)) for number, line in rest]


_EVENT: dict[str, type] = {"seq": int, "key": str, "kind": str, "payload": dict, "time": str}
_DAMAGED = "restore it from a copy, or start a new run"


def _parse(path: Path, number: int, line: bytes, fields: dict[str, type]) -> dict[str, Any]:
    """Parse one line of an export. The line must have exactly the keys of ``fields``, with values of their
    types."""
    try:
        data = parse(line)
    except ValueError as error:  # including UnicodeDecodeError
        raise DamagedError(f"{path}:{number}: not a line of JSON ({error}); export the run again") from None
    if not isinstance(data, dict) or data.keys() != fields.keys():
        wanted = ", ".join(fields)
        raise DamagedError(f"{path}:{number}: needs an object with exactly {wanted}; export the run again")
    for name, kind in fields.items():
        if type(data[name]) is not kind:
            raise DamagedError(f"{path}:{number}: {name!r} must be {kind.__name__}, not {data[name]!r}")
    return data


def _lock(path: Path) -> FileLock:
    """Lock the journal for this process. The operating system drops the lock when the process dies."""
    lock = FileLock(_lock_of(path), thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_ASKED, poll_interval=_ASKED / 20)
    except Timeout:
        raise JournalError(f"run {path} is in use by another process; wait for it, or stop it") from None
    except OSError as error:
        remedy = "choose a writable directory"
        raise JournalError(f"{path}: {error.strerror}; {remedy}") from error
    return lock


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


_ASKED = 0.2  # seconds to wait for the lock; `is_open` holds the lock for less time


def _refuse_leftovers(path: Path) -> None:
    if path.exists():
        raise JournalError(f"{path}: this run already exists; resume it, or choose another name")
    wal = path.with_name(path.name + "-wal")
    if wal.exists():  # SQLite would apply the old journal's pages to the new journal
        remedy = "remove it too, or choose another name"
        raise JournalError(f"{wal}: left over from a journal that was removed; {remedy}")


def _write_empty(path: Path, header: dict[str, Any]) -> None:
    """Create a journal without events. A rename puts the complete file at `path`, so that an interruption
    leaves a whole journal or none."""
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
    """Raise JournalError if a database is not a journal, is damaged or has another schema."""
    application, schema, health = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "quick_check")
    )
    if application != _APPLICATION:
        raise DamagedError(f"{path}: an SQLite file, but not a journal of coda-agent; check the run's name")
    if schema != SCHEMA:
        raise JournalError(
            f"{path}: schema {schema}, but this version reads {SCHEMA}; use the coda-agent that wrote it"
        )
    if health != "ok":
        raise DamagedError(f"{path}: damaged ({' '.join(health.split())}); {_DAMAGED}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors, and missing permissions, into JournalError with a remedy."""
    try:
        yield
    except PermissionError as error:
        raise JournalError(f"{path}: {error.strerror}; check who may read this folder") from None
    except sqlite3.ProgrammingError:  # a bug in this module
        raise
    except UnicodeDecodeError as error:  # SQLite's message may quote bytes that are no UTF-8
        raise DamagedError(f"{path}: damaged ({error.reason}); {_DAMAGED}") from error
    except sqlite3.DatabaseError as error:
        code = _code(error)
        if code == sqlite3.SQLITE_FULL:
            remedy = "free space on that disk and resume; committed steps are safe"
        elif isinstance(error, sqlite3.OperationalError) and code not in _WRONG:
            remedy = "check that the file can be read and written, then resume; committed steps are safe"
        else:
            raise DamagedError(f"{path}: {error}; {_DAMAGED}") from error
        raise JournalError(f"{path}: {error}; {remedy}") from error


# SQLite's errors for a file that is not a journal: tables are missing, or text is not UTF-8.
_WRONG = (None, sqlite3.SQLITE_ERROR)


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary error code; None for an error from Python's sqlite3 module itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return code if code is None else code & 0xFF


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
