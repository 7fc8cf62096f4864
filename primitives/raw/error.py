"""The refusal of edited code or of its object."""

from __future__ import annotations


class RawError(Exception):
    """Edited code or its object file is refused. ``code``: the kind of fault. ``message``: the fault and its
    remedy. ``line``: the line of the edited code, if known."""

    def __init__(self, code: str, message: str, line: int | None = None):
        super().__init__(message if line is None else f"line {line}: {message}")
        self.code = code
        self.message = message
        self.line = line
