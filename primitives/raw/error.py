"""The refusal of a raw module, or of its object."""

from __future__ import annotations


class RawError(Exception):
    """A refusal for the author: a code, a message with the remedy, and a line of the module if it has one."""

    def __init__(self, code: str, message: str, line: int | None = None):
        super().__init__(message if line is None else f"line {line}: {message}")
        self.code = code
        self.message = message
        self.line = line
