"""Errors of kernels, for their authors. Standard library only."""

from __future__ import annotations

LONGEST_MESSAGE = 2000


class ProgramError(Exception):
    """A fault in a program or kernel file: a reason code, a message for its author, and the line if known."""

    def __init__(self, code: str, message: str, line: int | None = None):
        if len(message) > LONGEST_MESSAGE:  # the message may quote a megabyte of text
            message = f"{message[:LONGEST_MESSAGE]} ..."
        super().__init__(message)
        self.code, self.message, self.line = code, message, line
