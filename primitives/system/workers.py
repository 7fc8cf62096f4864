"""Compile in parallel worker processes, which are started on demand, reused, and replaced when they die.

Python's multiprocessing does not fit: its spawned processes would import the user's script again, and a
crashed compiler would break the whole pool of processes. A worker runs this module with ``python -m``. The
worker reads one task per line and writes one answer per line, within the time and memory limits of
``primitives.system.subprocesses``.
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
Job = tuple[Task, Any]  # a task with its argument
SECONDS = 300.0  # limit per task; a configuration compiles in 2 s, and a worker's imports take 6 s


def count() -> int:
    """The number of compile workers: QUACK_COMPILE_WORKERS, or one per core up to 16."""
    return int(os.environ.get("QUACK_COMPILE_WORKERS") or min(16, os.cpu_count() or 1))


def run_all(task: Task, arguments: Iterable[Any], seconds: float | None = None) -> list[bool]:
    """Run one task on several arguments, like ``run_jobs``."""
    return run_jobs(((task, argument) for argument in arguments), seconds)


def run_jobs(jobs: Iterable[Job], seconds: float | None = None) -> list[bool]:
    """Run each task on its argument in a worker process; return results in order. A task's result is False if
    the task returned False, if its worker died, or if the task took longer than ``seconds`` (default
    SECONDS).

    A task must be a top-level function of a module. An exception in a task ends the worker, so the task's
    result is False.
    """
    limit, pool = SECONDS if seconds is None else seconds, _pool(os.getpid())
    try:
        return list(pool.threads.map(lambda job: pool.own().run(job, limit), jobs))
    # Ctrl-C does not reach the workers, because each leads its own process group. If they were not
    # interrupted, this process would wait for their tasks.
    except BaseException:
        for worker in pool.workers:
            worker.interrupt()
        raise


class _Pool:
    """Threads with one worker each."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(count(), thread_name_prefix="compile")
        self.workers: list[_Worker] = []
        self._local = threading.local()

    def own(self) -> _Worker:
        """The calling thread's worker."""
        if not hasattr(self._local, "worker"):
            self._local.worker = _Worker()
            self.workers.append(self._local.worker)
        worker: _Worker = self._local.worker
        return worker


@cache
def _pool(process: int) -> _Pool:
    """The pool of this ``process``. A fork has no thread of its parent, and must not end its parent's
    workers."""
    return _Pool()


class _Worker:
    """A process that waits for tasks. It exits when its input is closed or its parent dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.cubins = tempfile.TemporaryDirectory(prefix="coda-cubins-")  # removed with this object

    def run(self, job: Job, seconds: float) -> bool:
        if self.process is None or subprocesses.ended(self.process):  # an idle worker may have died
            self.end()
            self.process = self.start(self.cubins.name)
        line = base64.b64encode(pickle.dumps(job)) + b"\n"
        answer = subprocesses.ask(self.process, line, time.monotonic() + seconds)
        if not answer:
            self.end()
        return answer == b"True\n"

    def interrupt(self) -> None:
        """Make the worker's current task fail. A thread other than the worker's own calls this method."""
        process = self.process
        if process is not None:
            subprocesses.end(process)

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            subprocesses.hang_up(process)

    @staticmethod
    def start(cubins: str) -> subprocess.Popen[bytes]:
        """Start a worker's process. ``cubins``: the folder into which the compiler writes cubins, for tasks
        to inspect."""
        return subprocesses.converse(
            "coda_agent.primitives.system.workers",
            stderr=subprocess.DEVNULL,  # drops the compiler's messages about refused configurations
            env=subprocesses.environment() | {"CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": cubins},
        )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a compiler's prints do not mix with the answers
    for line in sys.stdin.buffer:
        task, argument = pickle.loads(base64.b64decode(line))
        answers.write(b"True\n" if task(argument) else b"False\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
