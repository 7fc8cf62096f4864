"""Turn a compiler's failure into a message for the kernel's author: the reason, and the line of lowered code.

A compiler's traceback mostly shows the compiler's own frames and paths, which say nothing about the kernel.
"""

from __future__ import annotations

import re

from coda_agent.primitives.errors import Refused
from coda_agent.primitives.system import subprocesses

_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|out of memory|allocate memory|memory allocation", re.IGNORECASE
)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_FRAME = re.compile(r'\s*File "(?P<path>[^"]*)", line \d+')
_LOWERED = re.compile(r"coda_lowered_\w+\.py$")
_FOLDERS = re.compile(r"(?<![\w.)\]/])/(?:[\w.+@~-]+/)+(?=[\w.+@~-])")


class CompileError(Refused):
    """The compiler refuses a lowered module. The error has a short message, a reason code and, if known, a
    line (of edited code) or a node (of a program)."""

    def __init__(
        self, message: str, code: str = "compiler", line: int | None = None, node: int | None = None
    ):
        super().__init__(message)
        self.code, self.line, self.node = code, line, node


def refusal(words: str) -> str:
    """Shorten a compiler's message. If the compiler ran out of memory, the result says so."""
    if not _NO_MEMORY.search(words):
        return shortened(words)
    limit = f"{subprocesses.MEMORY_BYTES / 2**30:g} GB"
    return f"the compiler exceeded {limit} of memory: {shortened(words, 300)}"


def shortened(words: str, limit: int = 1500) -> str:
    """Shorten a traceback to its last line of lowered code, and the reason (the text after the last frame).
    If the reason quotes the line, the line is not repeated. Only the last ``limit`` characters are kept."""
    lines = [line for line in _COLOURS.sub("", words).splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    own = [i + 1 for i in frames if (found := _FRAME.match(lines[i])) and _LOWERED.search(found["path"])]
    quoted = lines[own[-1]].strip() if own and own[-1] < len(lines) else ""
    after = frames[-1] + 1 if frames else 0
    # skip the frame's source line and its carets
    while frames and after < len(lines) and lines[after].startswith("    "):
        after += 1
    said = lines[after:] or lines[-1:]
    reason = _FOLDERS.sub("", "\n".join(line for line in said if "Warning" not in line))
    if quoted and quoted not in reason:
        reason = f"{quoted}\n{reason}"
    return reason[-limit:]
