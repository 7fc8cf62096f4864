"""Record every candidate kernel, and every text that Python compiles or executes while the project's code is
on the call stack. No candidate may be among these texts. A text runs *beneath* a frame if the frame is on the
call stack when Python compiles or executes the text.

The records come from audit events (PEP 578). ``trace`` raises an event with each candidate's source, and
``verify`` raises one with each edited text. Python raises an event for each text or file that it compiles or
executes. Each process writes its own log. All processes of a test session share the directory of the logs.
So a text counts as a candidate even if another process records the candidate, earlier or later. A text is
identified by its statements, so blanks, comments and line ends do not matter.

Tests may trace kernels themselves, so a text counts only in three cases:

1. The text runs beneath a frame of the project, and no test's frame is between this frame and the text. A
   test in between stands in for the jail. Frames of the tracer do not count. Frames of ``primitives`` do not
   count if a test called ``primitives`` directly.
2. The text runs in a thread that does nothing else.
3. The text runs in another process, which the project started beneath a frame as in case 1.

The jail's own child process is exempt: with Python's flags -I -S it loads no hook. The confined child that
compiles an edited text is exempt too; the function ``CONFINED`` on its call stack identifies this child.
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

DIRECTORY = "CODA_AGENT_AUDIT"  # the variable that names the directory of the logs
PACKAGES = ("agent", "comparison", "fused", "primitives", "verifier")
TRACER = "coda_agent.primitives.lang.kernel_file"  # this module executes kernel files for its callers
# the first function of the child that runs edited texts
CONFINED = ("coda_agent.primitives.raw.child", "_in_child")
POOLS = ("threading", "concurrent.futures.thread", __name__)
CANDIDATES = ("coda_agent.verifier.sandbox.jail.trace", "coda_agent.verifier.verify.check_edited")
HEARD = frozenset(("compile", "exec", "subprocess.Popen", *CANDIDATES))
# When Python imports code, these library modules compile thousands of their own short texts: names and
# annotations, but never a module. Such texts are not recorded.
MAKERS = tuple(
    os.path.join(os.path.dirname(os.__file__), *names)
    for names in (("typing.py",), ("dataclasses.py",), ("collections", "__init__.py"))
)
TELLING = 40  # bytes; no two unrelated texts of this length are equal by chance
WORDS = (b"primitives", b"cutlass")  # a kernel file imports the first, an edited text the second
DIGEST = 32  # characters
HERE = os.path.dirname(os.path.abspath(__file__))
# The project's own modules are not recorded as texts. One module contains a candidate as a string, with which
# the command ``doctor`` tests the jail.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
TESTS = os.path.join(ROOT, "tests") + os.sep
ROOTS = (ROOT, os.path.join(ROOT, "src", "coda_agent"))  # both are the same folder
OWN = tuple(os.path.join(root, package) + os.sep for root in ROOTS for package in PACKAGES)
PREFIXES = (sys.prefix, sys.base_prefix)
FOREIGN = tuple({named + os.sep for p in PREFIXES for named in (p, os.path.realpath(p))})

# hashes of the logged (path, line); each line is logged once, because a session has thousands of candidates
_logged: set[int] = set()
_busy = threading.local()  # marks a thread that parses a text, because parsing raises an event too
_hooked = False


def install() -> None:
    """Watch this process if the test session asks for it. Repeated calls have no effect."""
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
    """Record a text (str or bytes) that is compiled. Two other kinds of source are ignored. A syntax tree
    usually comes from a text that was recorded earlier. A source of None means that Python compiles a file;
    the execution of this file raises its own event."""
    if isinstance(source, str | bytes) and not str(path).startswith(OWN) and not _made_by_a_library():
        frame = _beneath()
        if frame is not None:
            _ran(_bytes(source), frame)


def _made_by_a_library() -> bool:
    # skip the frames of this function, ``_compiled`` and the hook
    compiling = sys._getframe(2).f_back
    return compiling is not None and compiling.f_code.co_filename in MAKERS


def _executes(code: CodeType) -> None:
    """Record a module that was compiled earlier. The text of the module is the content of its file."""
    path = code.co_filename
    if code.co_name != "<module>" or not os.path.isabs(path) or path.startswith((*FOREIGN, *OWN)):
        return
    frame = _beneath()
    if frame is not None:
        try:
            _ran(_bytes(Path(path).read_bytes()), frame)
        except OSError:
            return  # the name only looks like a path; the text was recorded when it was compiled


def _candidate(text: bytes) -> None:
    if text:
        _log("candidate", known_by(text))


def _ran(text: bytes, frame: str) -> None:
    """Record that a text ran beneath ``frame``. If ``frame`` is empty, record that the text ran in this
    process, which another process may have started."""
    if text and frame:
        _log("executed", known_by(text), frame)
    elif _telling(text) and "_pytest" not in sys.modules:
        _log("alone", known_by(text), _digest("\0".join(sys.orig_argv).encode("utf-8", "replace")))


def known_by(text: bytes) -> str:
    """Return the digests of the text's statements, joined. Return the digest of the whole text if the text is
    short, cannot be a candidate, or is not valid Python."""
    if _telling(text):
        _busy.parsing = True
        try:
            dumps = [ast.dump(statement).encode("utf-8", "replace") for statement in ast.parse(text).body]
            if dumps:
                return "".join(map(_digest, dumps))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # such a text never runs
        finally:
            _busy.parsing = False
    return _digest(text)


def _telling(text: bytes) -> bool:
    return len(text) >= TELLING and any(word in text for word in WORDS)


def _started(command: Any) -> None:
    """Record a process that the project starts. A text that runs in the started process counts as run by the
    project, even if the text runs beneath no frame of the project."""
    frame = _beneath()
    if frame and isinstance(command, list | tuple):
        words = "\0".join(map(os.fsdecode, command))
        _log("started", _digest(words.encode("utf-8", "replace")), frame)


def _pass_on(command: Any, environment: Any) -> None:
    """Add the hook's variables to ``environment``, which a caller made for a child process. Without these
    variables, a Python child would not load the hook."""
    alone = not isinstance(command, list | tuple) or "-I" in command or "-S" in command
    if alone or not isinstance(environment, dict) or DIRECTORY not in os.environ:
        return
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if HERE not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, paths)])
    environment.setdefault(DIRECTORY, os.environ[DIRECTORY])


def _beneath() -> str | None:
    """Return the project's nearest frame, as file:line. If the project has no frame on the call stack, return
    "", or a note if the thread does nothing but run the text. Return None if the process is a confined child,
    or if a test's frame is nearer than all the project's frames outside ``primitives``."""
    frame: FrameType | None = sys._getframe()
    found, pool = "", threading.current_thread() is not threading.main_thread()
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(TESTS) and not path.startswith(HERE):
            return None
        spec = frame.f_globals.get("__spec__")  # with ``python -m``, ``__name__`` is __main__
        name = str(getattr(spec, "name", None) or frame.f_globals.get("__name__"))
        if (name, frame.f_code.co_name) == CONFINED:
            return None
        if name != TRACER and name.partition(".")[0] == "coda_agent":
            found = found or f"{path}:{frame.f_lineno}"
            if not name.startswith("coda_agent.primitives"):  # tests use primitives directly
                return found
        pool = pool and name in POOLS
        frame = frame.f_back
    return "a thread that does nothing else" if pool else found


def _bytes(text: str | bytes) -> bytes:
    """Return the text as bytes, with line feeds as the only line ends and without surrounding blanks."""
    found = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return found.replace(b"\r\n", b"\n").replace(b"\r", b"\n").strip()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:DIGEST]


def _log(*words: str) -> None:
    if DIRECTORY not in os.environ:
        return  # a confined child has cleared its environment
    path = os.path.join(os.environ[DIRECTORY], f"{os.getpid()}.log")
    line = "\t".join(words).replace("\n", " ") + "\n"
    if (logged := hash((path, line))) not in _logged:
        _logged.add(logged)
        with suppress(FileNotFoundError):  # the session has ended, and its directory is gone
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, line.encode("utf-8", "replace"))
            os.close(descriptor)


class Account(NamedTuple):
    """The findings of a session: the number of watched processes, the digests of the candidates, and a
    sentence for each frame beneath which a candidate ran."""

    processes: int
    candidates: frozenset[str]
    violations: tuple[str, ...]


def account(directory: Path) -> Account:
    """Read all logs in ``directory``."""
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
    """Return pairs of an executed candidate and the frame beneath which the candidate ran. A candidate may be
    a part of a longer text."""
    holding = defaultdict(set)  # maps a statement to the texts that contain it
    for text, frame in executed:
        for place in range(0, len(text), DIGEST):
            holding[text[place : place + DIGEST]].add((text, frame))
    ran = {(c, frame) for c in candidates for text, frame in holding[c[-DIGEST:]] if c in text}
    return sorted(ran)


def _read(path: Path) -> Iterable[str]:
    return path.read_text(encoding="utf-8").splitlines()
