"""Errors of kernels, for their authors. This module needs only the standard library."""

from __future__ import annotations

LONGEST_MESSAGE = 2000


class ProgramError(Exception):
    """A fault in a program or kernel file: a reason code, a message for the author, and the line if it is
    known."""

    def __init__(self, code: str, message: str, line: int | None = None):
        if len(message) > LONGEST_MESSAGE:  # the message may quote a megabyte of text
            message = f"{message[:LONGEST_MESSAGE]} ..."
        super().__init__(message)
        self.code, self.message, self.line = code, message, line
