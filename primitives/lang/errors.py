"""Errors of kernels, for their authors. Standard library only."""

from __future__ import annotations

LONGEST_MESSAGE = 2000


class ProgramError(Exception):
    """A wrong program or kernel file: a reason code, a message for its author, and a line if known."""

    def __init__(self, code: str, message: str, line: int | None = None):
        if len(message) > LONGEST_MESSAGE:  # it may quote a megabyte
            message = f"{message[:LONGEST_MESSAGE]} ..."
        super().__init__(message)
        self.code, self.message, self.line = code, message, line
