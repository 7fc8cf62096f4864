"""Hears every candidate and every text that is compiled beneath the project: the two may never be the same.

``trace`` raises an audit event (PEP 578) with each candidate's source, ``verify`` one
with each edited text, Python one for each text or file that it compiles or executes. What this process heard
goes to a log of its own in a directory that all
processes of a test session share, so that a candidate of one may be compiled in another, before or after.
A text is known by its statements, whatever its blanks, comments and ends of lines are.
Tests may trace kernels themselves: what counts has a frame of ``verifier``, ``agent`` or ``primitives``
beneath it (of the tracer's alone it is its caller's), and none of a test's in between, which stands in for
the jail then; or it is all that a thread does; or it runs in a process that such a frame has started.
The jail's own child is exempt by construction: it runs with -I -S, which load no hook. So is the confined
child that compiles an edited text, by the frame that it begins with.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

DIRECTORY = "CODA_AGENT_AUDIT"  # the variable that names the logs' directory
PACKAGES = ("agent", "comparison", "fused", "primitives", "verifier")
TRACER = "coda_agent.primitives.lang.kernel_file"  # executes kernel files for whoever calls it
CONFINED = ("coda_agent.primitives.raw.child", "_in_child")  # where the child that runs edited texts begins
POOLS = ("threading", "concurrent.futures.thread", __name__)
CANDIDATES = ("coda_agent.verifier.sandbox.jail.trace", "coda_agent.verifier.verify.check_edited")
HEARD = frozenset(("compile", "exec", "subprocess.Popen", *CANDIDATES))
# These compile short texts of their own by the thousand at imports: names and annotations, never a module.
MAKERS = tuple(
    os.path.join(os.path.dirname(os.__file__), *names)
    for names in (("typing.py",), ("dataclasses.py",), ("collections", "__init__.py"))
)
TELLING = 40  # bytes that no other text holds by chance
WORDS = (b"primitives", b"cutlass")  # a kernel file imports one, an edited text the other
DIGEST = 32  # characters
HERE = os.path.dirname(os.path.abspath(__file__))
# Modules of the project's own: one of them holds a candidate as a string, for doctor to try the jail with.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
TESTS = os.path.join(ROOT, "tests") + os.sep
ROOTS = (ROOT, os.path.join(ROOT, "src", "coda_agent"))  # one folder, by two names
OWN = tuple(os.path.join(root, package) + os.sep for root in ROOTS for package in PACKAGES)
PREFIXES = (sys.prefix, sys.base_prefix)
FOREIGN = tuple({named + os.sep for p in PREFIXES for named in (p, os.path.realpath(p))})

_logged: set[int] = set()  # hashes of (path, line): a session has thousands of candidates
_busy = threading.local()  # while a text is parsed, which is an event of its own
_hooked = False


def install() -> None:
    """Watch this process, if a session asks for it; once."""
    global _hooked
    if DIRECTORY in os.environ:
        _log("watched")
        if not _hooked:
            sys.addaudithook(_hook)
        _hooked = True


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in HEARD or getattr(_busy, "parsing", False):
        return
    if event == "compile":
        _compiled(*arguments[:2])
    elif event == "exec":
        _executes(arguments[0])
    elif event in CANDIDATES:
        _candidate(_bytes(arguments[0]))
    elif event == "subprocess.Popen":
        _started(arguments[1])
        _pass_on(arguments[1], arguments[3])


def _compiled(source: object, path: object) -> None:
    """Text, as str or bytes. A syntax tree has been text, unless it was built; None is a file, which runs."""
    if isinstance(source, str | bytes) and not str(path).startswith(OWN) and not _made_by_a_library():
        frame = _beneath()
        if frame is not None:
            _ran(_bytes(source), frame)


def _made_by_a_library() -> bool:
    compiling = sys._getframe(2).f_back  # beneath this, _compiled and the hook
    return compiling is not None and compiling.f_code.co_filename in MAKERS


def _executes(code: CodeType) -> None:
    """A module that was compiled earlier: its text is the file's."""
    path = code.co_filename
    if code.co_name != "<module>" or not os.path.isabs(path) or path.startswith((*FOREIGN, *OWN)):
        return
    frame = _beneath()
    if frame is not None:
        try:
            _ran(_bytes(Path(path).read_bytes()), frame)
        except OSError:
            return  # a name like a path's; its text was seen when it was compiled


def _candidate(text: bytes) -> None:
    if text:
        _log("candidate", known_by(text))


def _ran(text: bytes, frame: str) -> None:
    """Beneath a frame; where there is none, in this process, which another may have started."""
    if text and frame:
        _log("executed", known_by(text), frame)
    elif _telling(text) and "_pytest" not in sys.modules:
        _log("alone", known_by(text), _digest("\0".join(sys.orig_argv).encode("utf-8", "replace")))


def known_by(text: bytes) -> str:
    """The digests of a text's statements, one after another; of the text as it is where that is short, no
    candidate's, or nothing that Python reads."""
    if _telling(text):
        _busy.parsing = True
        try:
            dumps = [ast.dump(statement).encode("utf-8", "replace") for statement in ast.parse(text).body]
            if dumps:
                return "".join(map(_digest, dumps))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # it never runs
        finally:
            _busy.parsing = False
    return _digest(text)


def _telling(text: bytes) -> bool:
    return len(text) >= TELLING and any(word in text for word in WORDS)


def _started(command: Any) -> None:
    """A process of the project's: what it runs, without a frame of ours, is ours too."""
    frame = _beneath()
    if frame and isinstance(command, list | tuple):
        words = "\0".join(map(os.fsdecode, command))
        _log("started", _digest(words.encode("utf-8", "replace")), frame)


def _pass_on(command: Any, environment: Any) -> None:
    """Into an environment that was made for a child: it may be Python's, and would not load the hook."""
    alone = not isinstance(command, list | tuple) or "-I" in command or "-S" in command
    if alone or not isinstance(environment, dict) or DIRECTORY not in os.environ:
        return
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if HERE not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, paths)])
    environment.setdefault(DIRECTORY, os.environ[DIRECTORY])


def _beneath() -> str | None:
    """The nearest frame of the project's, as file:line, or that a thread has no other; empty if there is none
    in a main thread. None if a test's is nearer than the verifier's and the agent's, or confinement is."""
    frame: FrameType | None = sys._getframe()
    found, pool = "", threading.current_thread() is not threading.main_thread()
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(TESTS) and not path.startswith(HERE):
            return None
        spec = frame.f_globals.get("__spec__")  # of python -m, whose name is __main__
        name = str(getattr(spec, "name", None) or frame.f_globals.get("__name__"))
        if (name, frame.f_code.co_name) == CONFINED:
            return None
        if name != TRACER and name.partition(".")[0] == "coda_agent":
            found = found or f"{path}:{frame.f_lineno}"
            if not name.startswith("coda_agent.primitives"):  # which tests use themselves
                return found
        pool = pool and name in POOLS
        frame = frame.f_back
    return "a thread that does nothing else" if pool else found


def _bytes(text: str | bytes) -> bytes:
    """Without the ends of lines that a system has, as Python reads it."""
    found = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return found.replace(b"\r\n", b"\n").replace(b"\r", b"\n").strip()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:DIGEST]


def _log(*words: str) -> None:
    if DIRECTORY not in os.environ:
        return  # confinement has given up what it had
    path = os.path.join(os.environ[DIRECTORY], f"{os.getpid()}.log")
    line = "\t".join(words).replace("\n", " ") + "\n"
    if (logged := hash((path, line))) not in _logged:
        _logged.add(logged)
        with suppress(FileNotFoundError):  # the session is over
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, line.encode("utf-8", "replace"))
            os.close(descriptor)


class Account(NamedTuple):
    """What a session's processes heard: how many they were, how many candidates, and what ran of them."""

    processes: int
    candidates: frozenset[str]
    violations: tuple[str, ...]


def account(directory: Path) -> Account:
    """Read all logs."""
    lines = [line.split("\t") for path in sorted(directory.glob("*.log")) for line in _read(path)]
    candidates = frozenset(words[1] for words in lines if words[0] == "candidate")
    starts = {words[1]: words[2] for words in lines if words[0] == "started"}
    executed = {(words[1], words[2]) for words in lines if words[0] == "executed"}
    alone = ((words[1], words[2]) for words in lines if words[0] == "alone")
    executed |= {
        (text, f"{starts[command]}, which started it") for text, command in alone if command in starts
    }
    said = tuple(f"candidate {text[:12]} ran beneath {frame}" for text, frame in _both(candidates, executed))
    return Account(sum(words[0] == "watched" for words in lines), candidates, said)


def _both(candidates: Iterable[str], executed: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The candidates that were executed, whole or within a longer text, and beneath what."""
    holding = defaultdict(set)  # a statement: the texts that hold it
    for text, frame in executed:
        for place in range(0, len(text), DIGEST):
            holding[text[place : place + DIGEST]].add((text, frame))
    ran = {(c, frame) for c in candidates for text, frame in holding[c[-DIGEST:]] if c in text}
    return sorted(ran)


def _read(path: Path) -> Iterable[str]:
    return path.read_text(encoding="utf-8").splitlines()
