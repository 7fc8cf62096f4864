"""The jail's child process. It reads a request from stdin, and writes the sandbox's layers and one result.

The child imports only the standard library and the parts of ``primitives`` that tracing needs, because every
import makes each trace slower.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata  # noqa: F401  # the parser needs it for non-ASCII names, and cannot import it later
import warnings
from types import TracebackType
from typing import Any, NoReturn

from coda_agent import primitives
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.kernel_file import trace_lines
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.system import sandbox
from coda_agent.verifier.sandbox import language

MESSAGE_CHARACTERS = 4000


def main() -> NoReturn:
    """Read the request, enter the sandbox, and only then check and trace the source."""
    request = json.loads(sys.stdin.buffer.read())
    warnings.simplefilter("ignore")  # because displaying a warning would import modules and open files
    result = _detach()
    layers, missing = sandbox.apply(request["parent"])
    _write(result, {"layers": layers, "missing": missing})
    if not request["weak"] and not {"seccomp", "landlock"} & set(layers):
        os._exit(0)

    def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _finish(result, _failure("crashed", f"tracing stopped with {kind.__name__}: {error}", None))

    sys.excepthook = last_words
    _finish(result, trace(request["source"], request["signature"]))


def trace(source: str, signature: dict[str, Any]) -> dict[str, Any]:
    """Check and trace a source; return ``{"program": text, "lines": [...]}`` or ``{"error": {...}}``."""
    source = source.removeprefix("\ufeff")  # the byte-order mark that some editors write
    try:
        language.check(source, primitives.__all__)
        program, lines = trace_lines(source, Signature.from_json(signature))
        return {"program": program.to_json(), "lines": lines}
    except ProgramError as error:
        return _failure(error.code, error.message, error.line)
    except MemoryError:
        limit = f"{sandbox.MEMORY_BYTES >> 20} MB"
        return _failure("memory", f"tracing takes over {limit}: a kernel builds a small graph, no data", None)


def _detach() -> int:
    """Redirect descriptors 0, 1 and 2 to /dev/null. Return a duplicate of standard error, to which the child
    writes its result."""
    result = os.dup(2)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return result


def _failure(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message[:MESSAGE_CHARACTERS], "line": line}}


def _write(descriptor: int, record: dict[str, Any]) -> None:
    text = (json.dumps(record) + "\n").encode()
    while text:
        text = text[os.write(descriptor, text) :]


def _finish(descriptor: int, record: dict[str, Any]) -> NoReturn:
    _write(descriptor, record)
    os._exit(0)  # without exit handlers and destructors, so that no code of the kernel runs after the result
