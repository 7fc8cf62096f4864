"""Worker processes that compile in parallel: started on demand, reused, replaced when one dies.

Not multiprocessing: spawning would import the user's script again, and a crashed compiler would break the
whole pool. ``python -m`` of this module is a worker: it reads a task a line and writes an answer a line,
within the time and memory of ``primitives.system.subprocesses``.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from coda_agent.primitives.system import subprocesses

Task = Callable[[Any], bool]
Job = tuple[Task, Any]  # with its argument
SECONDS = 300.0  # of one task: a configuration compiles in 2 s, a worker's imports take 6


def count() -> int:
    """Compile workers: QUACK_COMPILE_WORKERS, or one a core up to 16."""
    return int(os.environ.get("QUACK_COMPILE_WORKERS") or min(16, os.cpu_count() or 1))


def run_all(task: Task, arguments: Iterable[Any], seconds: float | None = None) -> list[bool]:
    """``run_jobs`` of one task on several arguments."""
    return run_jobs(((task, argument) for argument in arguments), seconds)


def run_jobs(jobs: Iterable[Job], seconds: float | None = None) -> list[bool]:
    """Run each task on its argument in a worker process, in order; False where the worker died, or was ended
    after ``seconds`` (SECONDS).

    A task is a module's function. An exception in it ends its worker, and counts as a death.
    """
    limit = SECONDS if seconds is None else seconds
    try:
        return list(_threads().map(lambda job: _own().run(job, limit), jobs))
    # Ctrl-C does not reach workers, which have their own groups, but the threads wait for theirs
    except BaseException:
        for worker in _workers:
            worker.interrupt()
        raise


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count(), thread_name_prefix="compile")


_local = threading.local()
_workers: list[_Worker] = []


def _own() -> _Worker:
    """The calling thread's worker."""
    if not hasattr(_local, "worker"):
        _local.worker = _Worker()
        _workers.append(_local.worker)
    worker: _Worker = _local.worker
    return worker


class _Worker:
    """A process that waits for tasks; it ends with its input, and with this process at the latest."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.cubins = tempfile.TemporaryDirectory(prefix="coda-cubins-")  # removed with this object

    def run(self, job: Job, seconds: float) -> bool:
        if self.process is None or subprocesses.ended(self.process):  # it may have died idle
            self.end()
            self.process = self.start(self.cubins.name)
        line = base64.b64encode(pickle.dumps(job)) + b"\n"
        answer = subprocesses.ask(self.process, line, time.monotonic() + seconds)
        if not answer:
            self.end()
        return answer == b"True\n"

    def interrupt(self) -> None:
        """Fail its task, from another thread."""
        process = self.process
        if process is not None:
            subprocesses.end(process)

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            subprocesses.hang_up(process)

    @staticmethod
    def start(cubins: str) -> subprocess.Popen[bytes]:
        """``cubins``: the folder where the compiler leaves them, for a task to inspect."""
        return subprocesses.converse(
            "coda_agent.primitives.system.workers",
            stderr=subprocess.DEVNULL,  # the compiler's messages on a refused configuration
            env=subprocesses.environment() | {"CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": cubins},
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
