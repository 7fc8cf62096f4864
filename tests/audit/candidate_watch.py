"""Hears every candidate and every text that is compiled beneath the verifier: the two may never be the same.

``verifier.jail.trace`` raises an audit event (PEP 578) with each candidate's source, ``verifier.verify`` one
with each edited text, Python one for each text or file that it compiles or executes. What this process heard
goes to a log of its own in a directory that all
processes of a test session share, so that a candidate of one may be compiled in another, before or after.
Tests may trace kernels themselves: what counts has a frame of ``verifier`` or ``agent`` beneath it, and none
of a test's in between, which stands in for the jail then.
The jail's own child is exempt by construction: it runs with -I -S, which load no hook.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

DIRECTORY = "CODA_AGENT_AUDIT"  # the variable that names the logs' directory
PACKAGES = ("verifier", "agent")
CANDIDATES = ("verifier.jail.trace", "verifier.verify.check_raw")
TELLING = 40  # bytes that no other text holds by chance
HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.dirname(HERE) + os.sep
# Modules of the project's own: one of them holds a candidate as a string, for doctor to try the jail with.
OWN = tuple(os.path.join(os.path.dirname(os.path.dirname(HERE)), package) + os.sep for package in PACKAGES)
FOREIGN = tuple({os.path.realpath(p) + os.sep for p in (sys.prefix, sys.base_prefix)})

_candidates: set[bytes] = set()
_executed: dict[bytes, str] = {}  # a text, and the frame beneath it
_logged: set[tuple[str, str]] = set()  # (path, line)
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
    if event == "compile":
        _compiled(*arguments[:2])
    elif event == "exec":
        _executes(arguments[0])
    elif event in CANDIDATES:
        _candidate(_bytes(arguments[0]))
    elif event == "subprocess.Popen":
        _pass_on(arguments[1], arguments[3])


def _compiled(source: object, path: object) -> None:
    """Text, as str or bytes. A syntax tree has been text, unless it was built; None is a file, which runs."""
    if isinstance(source, str | bytes) and not str(path).startswith(OWN):
        frame = _beneath()
        if frame:
            _ran(_bytes(source), frame)


def _executes(code: CodeType) -> None:
    """A module that was compiled earlier: its text is the file's."""
    path = code.co_filename
    if code.co_name != "<module>" or not os.path.isabs(path) or path.startswith((*FOREIGN, *OWN)):
        return
    frame = _beneath()
    if frame:
        try:
            _ran(_bytes(Path(path).read_bytes()), frame)
        except OSError:
            return  # a name like a path's; its text was seen when it was compiled


def _candidate(text: bytes) -> None:
    if text and text not in _candidates:
        _candidates.add(text)
        _log("candidate", _digest(text))
        for executed, frame in list(_executed.items()):
            _judge(text, executed, frame)


def _ran(text: bytes, frame: str) -> None:
    if text and text not in _executed:
        _executed[text] = frame
        _log("executed", _digest(text), frame)
        for candidate in list(_candidates):
            _judge(candidate, text, frame)


def _judge(candidate: bytes, executed: bytes, frame: str) -> None:
    """A candidate within a longer text; that both are the same shows in the logs."""
    if len(candidate) >= TELLING and candidate in executed:
        _log("within", _digest(candidate), frame)


def _pass_on(command: Any, environment: Any) -> None:
    """Into an environment that was made for a child: it may be Python's, and would not load the hook."""
    alone = not isinstance(command, list | tuple) or "-I" in command or "-S" in command
    if alone or not isinstance(environment, dict) or DIRECTORY not in os.environ:
        return
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if HERE not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, paths)])
    environment.setdefault(DIRECTORY, os.environ[DIRECTORY])


def _beneath() -> str:
    """The nearest frame of the verifier's or the agent's, as file:line; empty if a test's is nearer."""
    frame: FrameType | None = sys._getframe()
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(TESTS) and not path.startswith(HERE):
            return ""
        spec = frame.f_globals.get("__spec__")  # of python -m, whose name is __main__
        name = getattr(spec, "name", None) or frame.f_globals.get("__name__")
        if str(name).partition(".")[0] in PACKAGES:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _bytes(text: str | bytes) -> bytes:
    return (text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).strip()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _log(*words: str) -> None:
    path = os.path.join(os.environ[DIRECTORY], f"{os.getpid()}.log")
    line = "\t".join(words).replace("\n", " ") + "\n"
    if (path, line) not in _logged:
        _logged.add((path, line))
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
    ran = {(w[1], w[2]) for w in lines if w[0] == "within" or w[0] == "executed" and w[1] in candidates}
    said = tuple(f"candidate {digest[:12]} ran beneath {frame}" for digest, frame in sorted(ran))
    return Account(sum(words[0] == "watched" for words in lines), candidates, said)


def _read(path: Path) -> Iterable[str]:
    return path.read_text(encoding="utf-8").splitlines()
