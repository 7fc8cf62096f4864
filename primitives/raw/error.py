"""What is wrong with a raw module, or with the object it was compiled to."""

from __future__ import annotations


class RawError(Exception):
    """A refusal for the author: a code, words that say the remedy, and a line of the module if it has one."""

    def __init__(self, code: str, message: str, line: int | None = None):
        super().__init__(message if line is None else f"line {line}: {message}")
        self.code = code
        self.message = message
        self.line = line
