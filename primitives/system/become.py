"""Become another program that dies with its parent: ``python -I -S become.py PARENT COMMAND...``.

``subprocesses.start`` runs this file by path, so the file imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

NOT_STARTED, NOT_FOUND = 126, 127  # exit statuses for a command that could not start
_PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replace this process with the command. When the thread that started this process ends, Linux kills the
    command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))  # remains in force after exec
    if os.getppid() != parent:
        os._exit(1)  # the parent had already ended, so no signal would come
    # Python ignores these two signals; without a reset, the command would ignore them too
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
