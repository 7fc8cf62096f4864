"""Trace untrusted source in a jailed process, the only place where a kernel file's Python runs.

The child (``jail_child``) has an empty environment, its own session, and no access to files, network or
further processes (see ``sandbox``). The child checks the language (see ``language``) before the trace. The
parent does not trust the child's result. So the parent parses the program again, and checks bounds and types.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from coda_agent.primitives.errors import Absent
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.system import subprocesses
from coda_agent.primitives.system.sandbox import CPU_SECONDS
from coda_agent.verifier.report import Rejected
from coda_agent.verifier.sandbox.syntax_tree import MAX_SOURCE_BYTES

MAX_OUTPUT_BYTES = 1 << 20
GATE = "trace"
# With -I -S, the child uses no environment variables and no user or installed packages. This package's root
# comes last on the child's path, so that no file under the root hides a module of Python's library. The child
# lives for milliseconds. It runs without garbage collection, which would take a twentieth of this time.
BOOT = "import gc, sys; gc.disable(); sys.path.append(sys.argv[1]); "
BOOT += "import coda_agent.verifier.sandbox.jail_child as j; j.main()"
_CODE = re.compile(r"[a-z][a-z0-9_]{0,31}")
ROOT = Path(__file__).absolute().parents[3]


class JailUnavailable(Absent):
    """This system cannot confine a kernel, or the child did not start. No code of the kernel has run."""


@dataclass(frozen=True)
class Traced:
    """A program from the jail. ``lines``: the source line of each node, as the child reports it. ``layers``:
    the sandbox's active layers, such as seccomp and Landlock. ``missing``: the layers that this system lacks.
    ``seconds``: the wall time."""

    program: Program
    lines: tuple[int | None, ...]
    layers: tuple[str, ...]
    missing: tuple[str, ...]
    seconds: float


def trace(
    source: str, signature: Signature, *, wall_seconds: float = 5.0, weak: bool = False
) -> Traced | Rejected:
    """Trace a kernel file against ``signature`` in the jail.

    Returns ``Rejected`` for any fault or forbidden action of the source. Raises JailUnavailable if the system
    has neither seccomp nor Landlock. With ``weak``, such a system is accepted; then only the language check
    and the resource limits confine the source.
    """
    sys.audit(
        "coda_agent.verifier.sandbox.jail.trace", source
    )  # an audit hook of the tests checks that this source runs only in the jail
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        return _reject("too_large", f"the file has {size} bytes of at most {MAX_SOURCE_BYTES}: shorten it")
    request = {"source": source, "signature": signature.to_json(), "parent": os.getpid(), "weak": weak}
    start = time.monotonic()
    ending = _converse(json.dumps(request).encode(), wall_seconds)
    account, _, answer = ending.output.partition(b"\n")
    layers, missing = _layers(account, ending)
    if not weak and not {"seccomp", "landlock"} & set(layers):
        raise JailUnavailable(
            "this system offers neither seccomp nor Landlock to confine a kernel's tracing: allow one "
            "(Linux 5.13 or later; in a container, a runtime that lets its processes set a seccomp filter), "
            "or, for sources you trust, say --weak-jail"
        )
    result = _judge(answer, ending, wall_seconds, signature)
    if isinstance(result, Rejected):
        return result.model_copy(update={"evidence": {"missing_layers": missing}}) if missing else result
    return Traced(*result, layers, missing, time.monotonic() - start)


@dataclass(frozen=True)
class _Ending:
    """The outcome of a child that has exited. ``status`` is negative if a signal killed the child."""

    output: bytes
    status: int
    late: bool = False
    flooded: bool = False


def _converse(request: bytes, wall_seconds: float) -> _Ending:
    deadline = time.monotonic() + wall_seconds
    # the request is a file and not a pipe, so that a stalled child cannot block this process
    with subprocesses.memory_file(request) as letter, _child(letter) as (process, descriptor):
        output, late = subprocesses.read_answer(descriptor, deadline, MAX_OUTPUT_BYTES)
        status = subprocesses.end(process)
    return _Ending(output, status, late, flooded=len(output) > MAX_OUTPUT_BYTES)


@contextmanager
def _child(letter: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the child; yield it and the descriptor of its result. Afterwards, always kill the child and close
    the descriptor."""
    descriptor, other_end = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", BOOT, str(ROOT)],
                stdin=letter, stdout=subprocess.DEVNULL, stderr=other_end,
                env={}, cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise JailUnavailable(f"cannot start {sys.executable!r} to trace in: {error}") from error
        finally:
            os.close(other_end)
        try:
            yield process, descriptor
        finally:
            subprocesses.end(process)
    finally:
        os.close(descriptor)


def _layers(account: bytes, ending: _Ending) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sandbox's active and missing layers, from the child's first line. The child writes this line before
    it reads the source, so no kernel can forge it."""
    try:
        record = json.loads(account)
        return tuple(record["layers"]), tuple(record["missing"])
    except (ValueError, TypeError, KeyError):
        said = ending.output[-2000:].decode("utf-8", "replace").strip()
        why = "it was too slow to start" if ending.late else subprocesses.how(ending.status)
        raise JailUnavailable(
            f"the jail's child did not start ({why}): {said or 'it said nothing'}; "
            f"check that {sys.executable} starts with -I -S and can read {ROOT}"
        ) from None


Judged = tuple[Program, tuple[int | None, ...]] | Rejected


def _judge(answer: bytes, ending: _Ending, wall_seconds: float, signature: Signature) -> Judged:
    if ending.flooded:
        return _reject("too_large", f"the result is over {MAX_OUTPUT_BYTES} bytes: trace fewer operations")
    if ending.late or ending.status == -signal.SIGXCPU:
        limit = f"{wall_seconds:g} s" if ending.late else f"{CPU_SECONDS} s of CPU"
        return _reject("timeout", f"tracing took over {limit}: loops and calls run as Python, so use fewer")
    if ending.status != 0 or not answer.endswith(b"\n"):
        how = subprocesses.how(ending.status)
        return _reject("crashed", f"the tracing process died ({how}) without a result")
    record = _record(answer)
    try:
        match record:
            case {"program": str(text), "lines": list(lines)} if len(record) == 2:
                program = Program.from_json(text, signature)
                if len(lines) == len(program.nodes) and all(map(_is_line, lines)):
                    return program, tuple(lines)
            case {"error": {"code": str(code), "message": str(message), "line": int() | None as line}}:
                if _CODE.fullmatch(code) and _is_line(line):
                    return _reject(code, _printable(message), line)
    except ProgramError as error:
        return _reject(error.code, _printable(error.message), error.line)
    return _reject("forged", "the tracing process sent data that is not a result of the tracer")


def _is_line(line: object) -> bool:
    """Whether ``line`` can be a line number of a kernel file. None, for an unknown line, is allowed."""
    return line is None or type(line) is int and 0 < line <= MAX_SOURCE_BYTES


def _record(answer: bytes) -> Any:
    """Parse an answer as JSON; return None if this fails."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _printable(message: str) -> str:
    """The first 4000 characters of a message. Unprintable characters become question marks."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in message[:4000])


def _reject(code: str, message: str, line: int | None = None) -> Rejected:
    return Rejected(gate=GATE, code=code, message=message, line=line)
