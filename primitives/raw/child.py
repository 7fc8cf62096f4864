"""Run a confined child process on edited code, limit the child's resources, and read the child's untrusted
results."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import stat
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from coda_agent.primitives.raw.confine import confine
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.system import subprocesses

SECONDS = 120.0  # per compilation, which usually takes 2 s
MOST_OBJECT, MOST_ANSWER = 16 << 20, 1 << 20  # bytes
MOST_FILES = 256 << 20  # limit on the bytes in the child's files
MOST_WORDS = 2000  # limit on the characters of a compiler's message
LAYERS = frozenset({"seccomp", "landlock"})  # restrictions that must precede reading edited code


def run(work: Callable[[], dict[str, Any]], scratch: Path) -> Any:
    """Run ``work`` in a forked, confined child. Return the child's result, or its refusal as a dict. Raises
    RawError if the child gives no valid answer in time. In every case, the child and its processes have ended
    before this function does."""
    parent, (answers, answer) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        _in_child(work, parent, scratch, answer)
    os.close(answer)
    try:
        said, late = subprocesses.read_answer(
            answers, time.monotonic() + SECONDS, MOST_ANSWER, partial(_limit_files, scratch)
        )
    finally:
        os.close(answers)
        status = _reap(child)
    if late:
        raise RawError("slow_compile", f"the compile did not end within {SECONDS:g} s", None)
    if len(said) > MOST_ANSWER:
        raise RawError("forged", f"the compiling child answered with over {MOST_ANSWER} bytes", None)
    if not said:
        raise RawError("compiler_died", f"the compiling child ended with status {status}", None)
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        raise RawError("forged", "the compiling child gave no valid answer", None) from None


def _in_child(work: Callable[[], dict[str, Any]], parent: int, scratch: Path, answer: int) -> None:
    try:
        demand(*confine(parent, scratch, keep=(answer,)))
        found: object = work()
    except RawError as error:
        found = refusal_fields(error)
    # any exception of edited code, including SystemExit, is reported to the author
    except BaseException as error:
        found = {"code": "compiler"} | _words(error, scratch)
    with suppress(BaseException), os.fdopen(answer, "w") as pipe:
        pipe.write(json.dumps(found))
    os._exit(0)


def refusal(told: object, text: str) -> RawError | None:
    """Return the error if a confined child's answer says that the child refused ``text``; otherwise None. The
    edited code may have written parts of the answer. So types are checked, and terminal control sequences are
    removed."""
    match told:
        case {"code": str(code), "message": str(message), "line": int() | None as line}:
            known = line if line and 0 < line <= text.count("\n") + 1 else None
            return RawError(_printable(code[:32]), _printable(message)[:MOST_WORDS], known)
    return None


_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours and other terminal control sequences


def _printable(words: str) -> str:
    words = _COLOURS.sub("", words)
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in words)


def demand(layers: Collection[str], missing: Collection[str]) -> None:
    """Raise RawError if a process is not confined well enough to read edited code. ``layers``: the
    restrictions in force. ``missing``: the restrictions that the system lacks."""
    if not set(layers) >= LAYERS:
        raise RawError(
            "weak_jail",
            f"this system lacks {', '.join(missing)}: raw CuTeDSL is read behind seccomp and Landlock only "
            "(Linux 5.13 or later; in a container, a runtime that lets its processes set a seccomp filter)",
        )


def refusal_fields(error: RawError) -> dict[str, Any]:
    """Return an error's fields as a dict, from which ``refusal`` makes the error again."""
    return {"code": error.code, "message": error.message, "line": error.line}


def _words(error: BaseException, scratch: Path) -> dict[str, Any]:
    """The message of a compiler's exception, and the line of edited code that caused the exception."""
    line, seen = None, error
    while line is None:
        frames = traceback.extract_tb(seen.__traceback__)
        line = next((f.lineno for f in reversed(frames) if Path(f.filename).parent == scratch), None)
        if (cause := seen.__cause__ or seen.__context__) is None:
            break
        seen = cause
    words = _COLOURS.sub("", "".join(traceback.format_exception_only(error)))
    return {"message": words.strip()[-MOST_WORDS:], "line": line}


def _limit_files(scratch: Path) -> None:
    """Raise RawError if the child's files take too much disk space."""
    if _bytes_in(scratch) > MOST_FILES:
        raise RawError("files", f"the compile wrote over {MOST_FILES} bytes to files", None)


def _bytes_in(scratch: Path) -> int:
    """The bytes that a child's files take on disk. Raises RawError if some files cannot be listed."""
    held = 0
    for place, _, names in os.walk(scratch, onerror=_hidden):
        for name in names:
            try:
                held += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError as error:
                _hidden(error)
    return held


def _hidden(error: OSError) -> None:
    """Raise RawError for a file or folder that cannot be read, because the size of its content is unknown.
    Ignore a file that was removed in the meantime."""
    if not isinstance(error, FileNotFoundError):
        raise RawError("files", f"the compile made folders that cannot be listed: {error.strerror}", None)


def _reap(child: int) -> int:
    """Kill the child and the rest of its process group, reap the child, and return its exit status."""
    for kill in (os.killpg, os.kill):  # the child leads its own group once it is confined
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_untrusted(path: Path) -> bytes:
    """Read a file that may come from an untrusted process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RawError("no_object", f"the compile left no object: {error.strerror}", None) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RawError("no_object", "the compile left no object: its path is not a file", None)
        data = b""
        while len(data) <= MOST_OBJECT and (chunk := os.read(descriptor, MOST_OBJECT + 1 - len(data))):
            data += chunk
    finally:
        os.close(descriptor)
    if len(data) > MOST_OBJECT:
        raise RawError("object", f"the object has over {MOST_OBJECT} bytes", None)
    return data


def empty(scratch: Path) -> None:
    """Remove everything that a child created. This includes unreadable folders, and folders nested so deeply
    that their paths would be too long."""
    while left := list(scratch.iterdir()):
        for path in left:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
                continue
            path.chmod(0o700)
            for inner in path.iterdir():  # move inner entries up, so that no path gets too long
                if inner.is_dir() and not inner.is_symlink():
                    inner.chmod(0o700)
                inner.rename(scratch / secrets.token_hex(16))
            path.rmdir()
