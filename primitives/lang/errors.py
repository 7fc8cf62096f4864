"""What is wrong with a kernel, for its author. Standard library only."""

from __future__ import annotations

LONGEST_MESSAGE = 2000


class ProgramError(Exception):
    """A program or kernel file that is wrong: a reason code, words for its author, a line if known."""

    def __init__(self, code: str, message: str, line: int | None = None):
        if len(message) > LONGEST_MESSAGE:  # it quotes what may be a megabyte
            message = f"{message[:LONGEST_MESSAGE]} ..."
        super().__init__(message)
        self.code, self.message, self.line = code, message, line
