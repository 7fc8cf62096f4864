"""The refusal of edited code or of its object."""

from __future__ import annotations


class RawError(Exception):
    """Edited code or its object is refused. The error has a code, a message with the remedy, and the line if
    known."""

    def __init__(self, code: str, message: str, line: int | None = None):
        super().__init__(message if line is None else f"line {line}: {message}")
        self.code = code
        self.message = message
        self.line = line
