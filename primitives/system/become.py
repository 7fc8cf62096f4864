"""Become another program that dies with this process's parent: ``python -I -S become.py PARENT COMMAND...``.

``subprocesses.start`` runs this file by its path, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

NOT_STARTED, NOT_FOUND = 126, 127  # exit statuses of a command that could not start
_PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replace this process with the command. The command is killed when the thread of the parent that started
    it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))  # this setting survives exec
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before its death could signal us
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, which the program would inherit
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
