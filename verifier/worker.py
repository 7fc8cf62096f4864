"""Run GPU work in an expendable process (a worker), so that a kernel that hangs or writes out of bounds kills
only the worker.

The user's command itself holds no CUDA context, but gives tasks to a ``Worker``. If the worker is lost, the
candidate is rejected with the reason, and a fresh worker starts on a clean GPU. A worker runs this module
with ``python -m``. The worker reads one task per line. For each task, it writes lines of progress, and one
line with the answer.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coda_agent.primitives.system import deadline, subprocesses
from coda_agent.primitives.system.sandbox import die_with
from coda_agent.verifier.gates import Failed, Progress, silent

Task = Callable[[Any], dict[str, Any]]  # a top-level function of a module; it returns JSON data

ROOT = str(Path(__file__).absolute().parents[2])  # the folder that contains our packages
SAID = 2000  # how many characters of a lost worker's last output to keep
_CUDA_ERROR = re.compile(r"cuda\w*[ _](?:driver )?error|cudaError|CUDA_ERROR", re.IGNORECASE)
_ASTRAY = re.compile(r"illegal (?:memory access|address)|IllegalAddress|misaligned", re.IGNORECASE)


class Lost(Failed):
    """The worker is gone or unusable. ``code`` is ``crashed``, ``hung``, ``illegal_address``,
    ``device_error`` or ``out_of_memory``. If the candidate ran at that time, the candidate is rejected."""


class WorkerError(Exception):
    """A failure of a worker that no kernel caused, and that is therefore our own bug. The message holds the
    worker's traceback or output."""


class Worker:
    """A process that runs tasks on the GPU. The constructor does not wait until the process has finished its
    imports, which take seconds.

    ``wrapper``: a command to run the process under, such as compute-sanitizer. ``ahead``: modules to import
    before the first task. ``python``: the interpreter, by default this process's. An interpreter of another
    environment does not get this process's PYTHONPATH, because PYTHONPATH would override the environment's
    own packages. ``env``: the worker's environment variables, by default those of this process. ``name``:
    what messages call the worker.
    """

    def __init__(
        self,
        wrapper: Sequence[str] = (),
        ahead: Sequence[str] = (),
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        name: str = "the GPU worker",
    ):
        self.name = name  # for messages
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process is)
        self._process = subprocesses.start(
            [*wrapper, python, "-m", "coda_agent.verifier.worker", *ahead],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=dict(os.environ if env is None else env)
            | {"PYTHONPATH": subprocesses.path() if python == sys.executable else ROOT},
        )
        self._unread = b""
        self._asked = False

    def ask(
        self, task: Task, argument: Any, *, patience: float, progress: Progress = silent
    ) -> dict[str, Any]:
        """Give the worker a task; return its answer.

        Raises Failed if the task raised Failed. Raises Lost, and kills the worker, if the worker dies, is
        silent for ``patience`` seconds, or can no longer use the GPU. Raises WorkerError for our own bugs.
        The death of a worker before its first task counts as our bug, because no kernel can have caused it.
        Raises Late, and kills the worker, at the deadline (``primitives.system.deadline``).
        """
        assert self._process.stdin is not None  # a pipe
        if not self._asked and subprocesses.ended(self._process):
            raise self._stillborn()
        self._asked = True
        with suppress(BrokenPipeError):  # the worker died; reading the answer will report it
            self._process.stdin.write(base64.b64encode(pickle.dumps((task, argument))) + b"\n")
            self._process.stdin.flush()
        while True:
            match self._line(patience):
                case {"progress": [str(gate), str(words)]}:
                    progress(gate, words)
                case {"answer": dict(answer)}:
                    return answer
                case {"failed": {"code": code, "message": message, "line": line, "evidence": evidence}}:
                    raise Failed(code, message, line, **evidence)
                case {"lost": [str(code), str(message)]}:
                    self.close()
                    raise Lost(code, message)
                case {"bug": str(trace)}:
                    self.close()
                    raise WorkerError(f"a task of {self.name} failed:\n{trace}")
                case other:
                    self.close()
                    raise WorkerError(f"{self.name} said {str(other)[:200]!r}, which is not an answer")

    @property
    def alive(self) -> bool:
        return not subprocesses.ended(self._process)

    def close(self) -> None:
        """Kill the process and all its children; a second call does nothing."""
        subprocesses.end(self._process)
        for file in (self._process.stdin, self._process.stdout, self._words):
            if file is not None:
                with suppress(BrokenPipeError):
                    file.close()

    def finish(self, patience: float) -> int:
        """Let the worker exit by itself, so that its wrapper can report; return the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        limit = deadline.within(patience)
        try:
            return self._process.wait(limit - time.monotonic())
        except subprocess.TimeoutExpired:
            deadline.check(limit)
            raise Lost("hung", f"{self.name} did not end within {patience:g} s") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, patience: float) -> Any:
        assert self._process.stdout is not None  # a pipe
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        limit = deadline.within(patience)
        while b"\n" not in self._unread:
            left = limit - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                self.close()
                deadline.check(limit)
                raise Lost("hung", f"{self.name} was silent for {patience:g} s: a kernel does not finish")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise self._death()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _death(self) -> Lost:
        how = subprocesses.how(self._process.wait())
        said = self._said(SAID)
        self.close()
        return Lost("crashed", f"{self.name} died ({how}): {said or 'it said nothing'}")

    def _stillborn(self) -> WorkerError:
        said = self._said(SAID)
        self.close()
        return WorkerError(f"a GPU worker died before its first task: {said or 'it said nothing'}")

    def _said(self, characters: int) -> str:
        self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, self._words.tell() - characters))
        return self._words.read().decode("utf-8", "replace").strip()


def report(gate: str, words: str) -> None:
    """Report progress to the parent process from within a task. A report also shows that the worker is
    alive."""
    if _answers is not None:
        _say({"progress": [gate, words]})


_answers: Any = None  # in a worker, the file for the lines that it writes; None in other processes


def _say(record: dict[str, Any]) -> None:
    _answers.write(json.dumps(record).encode() + b"\n")
    _answers.flush()


def cuda_error(words: str) -> bool:
    """Whether an exception's message says that this process lost its GPU."""
    return _CUDA_ERROR.search(words) is not None


def _serve(ahead: Sequence[str]) -> None:
    global _answers
    # without this call, a wrapper such as compute-sanitizer would die with its parent, but leave this process
    # running
    with suppress(OSError):
        die_with(os.getppid())
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that a compiler's prints do not mix with the answers
    try:
        for module in ahead:
            importlib.import_module(module)
    except Exception:  # no kernel has run yet, so this is our bug
        _say({"bug": traceback.format_exc()})
        raise
    for line in sys.stdin.buffer:
        task, argument = pickle.loads(base64.b64decode(line))
        _say(_outcome(task, argument))


def _outcome(task: Task, argument: Any) -> dict[str, Any]:
    try:
        return {"answer": task(argument)}
    except Failed as failed:
        return {"failed": {k: getattr(failed, k) for k in ("code", "message", "line", "evidence")}}
    except Exception as error:
        words = str(error)
        # torch's class, compared by name because not every task imports torch
        if type(error).__name__ == "OutOfMemoryError":
            return {
                "lost": ["out_of_memory", f"the GPU has too little memory for this kernel: {words[:SAID]}"]
            }
        if cuda_error(words):
            code = "illegal_address" if _ASTRAY.search(words) else "device_error"
            return {"lost": [code, words[:SAID]]}
        return {"bug": traceback.format_exc()}


if __name__ == "__main__":
    from coda_agent.verifier.worker import (
        # imported by name, because tasks report through the imported module and not through __main__
        _serve as serve,
    )

    serve(sys.argv[1:])
