"""Worker processes that compile in parallel: started by need, kept, replaced when one dies.

Not multiprocessing: spawning would import the user's script again, and a compiler that crashes would
break the whole pool. ``python -m primitives.workers`` is a worker: a task a line in, an answer a line out.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

Task = Callable[[Any], bool]


def count() -> int:
    """Compile workers: QUACK_COMPILE_WORKERS, or one a core up to 16."""
    return int(os.environ.get("QUACK_COMPILE_WORKERS") or min(16, os.cpu_count() or 1))


def run_all(task: Task, arguments: Iterable[Any]) -> list[bool]:
    """``task(a)`` in a worker process for each argument, in order; False where the worker died of it.

    ``task`` is a module's function. An exception in it ends its worker, and counts as a death.
    """
    return list(_threads().map(lambda a: _own().run(task, a), arguments))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count(), thread_name_prefix="compile")


_local = threading.local()


def _own() -> _Worker:
    """The calling thread's worker."""
    if not hasattr(_local, "worker"):
        _local.worker = _Worker()
    worker: _Worker = _local.worker
    return worker


class _Worker:
    """A process that waits for tasks; it ends when its input does, with this process at the latest."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, task: Task, argument: Any) -> bool:
        if self.process is None:
            self.process = self.start()
        assert self.process.stdin is not None and self.process.stdout is not None  # both are pipes
        try:
            self.process.stdin.write(base64.b64encode(pickle.dumps((task, argument))) + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            self.process.kill()
            self.process.wait()
            self.process = None
        return answer == b"True\n"

    @staticmethod
    def start() -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-m", "primitives.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a refused configuration makes the compiler say
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a compiler that prints must not be taken for an answer
    for line in sys.stdin.buffer:
        task, argument = pickle.loads(base64.b64decode(line))
        answers.write(b"True\n" if task(argument) else b"False\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
