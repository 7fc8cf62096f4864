"""Start child processes that end with their parent, and limit their time and memory.

A compiler can crash, hang or exhaust memory. Each child leads a process group, and ``end`` kills the whole
group, including the child's own children. If the parent ends first, Linux kills the child, because the child
requests this before its program starts. Linux counts the thread that started the child as the parent. So one
thread, which lives as long as the process, starts all children. This module imports only the standard
library.

``output`` runs commands that the project trusts, without these protections. Two kinds of children that run
untrusted code do not use ``start``, but use other functions of this module. The jail
(``verifier.sandbox.jail``) is a bare Python that confines itself. ``start`` would first run another Python,
so that a trace would take 1.5 times as long. The child that compiles edited code (``primitives.raw.child``)
is a fork that inherits its imports, because importing would take longer than the child's work.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from coda_agent.primitives.system import become
from coda_agent.primitives.target import TARGET

# Limit on a process's private writable memory. A normal compilation takes 0.4 GB, even in a worker that has
# run for an hour. A limit on address space would also count memory that CUDA and the compiler only reserve
# (1.3 GB without a GPU).
MEMORY_BYTES = 16 << 30
WORDS_BYTES = 1 << 16
PATIENCE = 200  # milliseconds between checks whether a silent child has exited


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command in a process that leads a process group and dies with this process. ``options``:
    arguments of Popen.

    A command that cannot start exits with ``become.NOT_FOUND`` or ``NOT_STARTED``, as in a shell, and says
    why on standard error.
    """
    bound = [sys.executable, "-I", "-S", become.__file__, str(os.getpid()), *command]

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(bound, start_new_session=True, **options)

    return _starter(os.getpid()).submit(begin).result()


@cache
def _starter(process: int) -> ThreadPoolExecutor:
    """The thread that starts the children of this ``process``. A fork has no thread of its parent."""
    return ThreadPoolExecutor(1, thread_name_prefix="starter")


def start_module(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m module *arguments`` like ``start``, with at most MEMORY_BYTES of memory per
    process."""
    process = start([sys.executable, "-m", module, *arguments], **options)
    with suppress(ProcessLookupError):  # the child has already exited
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_DATA)
        limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
    return process


def output(*command: str, seconds: float | None = None, stderr: int = subprocess.PIPE) -> str:
    """Run a trusted command, and return its standard output. ``stderr``: as for Popen. Raises OSError if the
    command cannot start or takes longer than ``seconds``, and CalledProcessError if its status is not 0."""
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(command, stdout=pipe, stderr=stderr, text=True, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer in {seconds:g} s", command[0]) from None
    return done.stdout


def converse(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a module as ``start_module`` does, with the pipes that ``ask`` uses. End the child with
    ``hang_up``."""
    pipe = subprocess.PIPE
    process = start_module(module, *arguments, stdin=pipe, stdout=pipe, bufsize=0, **options)
    # so that a write to a child that hangs does not wait
    os.set_blocking(_pipes(process)[0].fileno(), False)
    return process


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def environment() -> dict[str, str]:
    """The environment for a child that compiles for Hopper. The environment contains no API keys or other
    secrets, because the child may compile untrusted code."""
    kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    return kept | TARGET.environment | {"PYTHONPATH": path()}


def path() -> str:
    """PYTHONPATH for a child that must import this project from any directory."""
    root = str(Path(__file__).absolute().parents[3])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def attend(
    begin: Callable[..., subprocess.Popen[Any]], text: str, seconds: float
) -> tuple[int | None, str, str]:
    """Run a process: send it ``text`` and wait until it exits. ``begin`` starts the process, and takes the
    arguments ``stdin``, ``stdout`` and ``stderr`` of Popen. The process must lead a process group.

    Returns the process's exit status (None if the process took longer than ``seconds``), its output, and the
    end of its standard error. On return, all processes of the group have ended.
    """
    # Files are used instead of pipes, because a grandchild could keep a dead child's pipes open. The files
    # are in memory, because a disk may be full.
    with memory_file(text.encode()) as given, memory_file() as output, memory_file() as errors:
        process = begin(stdin=given, stdout=output, stderr=errors)
        try:
            timely = _wait(process, seconds)
        finally:
            status = end(process)
        output.seek(0)
        said, words = output.read().decode("utf-8", "replace"), tail(errors)
    return status if timely else None, said, words


def memory_file(contents: bytes = b"") -> IO[bytes]:
    """A file in memory, positioned at its start."""
    file = os.fdopen(os.memfd_create("coda"), "w+b")
    file.write(contents)
    file.seek(0)
    return file


def tail(file: IO[bytes]) -> str:
    """Return the last WORDS_BYTES bytes of a file as text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - WORDS_BYTES))
    return file.read().decode("utf-8", "replace")


def ask(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """Send a line to the child; return the child's answer, which is also a line. The answer is empty if the
    child dies first, or does not answer before the ``deadline`` (of ``time.monotonic()``). The deadline holds
    even if another process keeps the child's pipes open."""
    tasks, answers = (pipe.fileno() for pipe in _pipes(process))
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    poll.register(tasks, select.POLLOUT)
    answer = b""
    while time.monotonic() < deadline:
        ready = [descriptor for descriptor, _ in poll.poll(PATIENCE)]
        if answers in ready:
            answer += (said := os.read(answers, 1 << 16))
            if not said or answer.endswith(b"\n"):
                return answer if said else b""
        elif tasks in ready:
            try:
                line = line[os.write(tasks, line) :]
            except BrokenPipeError:
                break
            if not line:
                poll.unregister(tasks)
        elif ended(process):
            break
    return b""


def read_answer(
    descriptor: int, deadline: float, most: int, watch: Callable[[], None] = lambda: None
) -> tuple[bytes, bool]:
    """Read an untrusted child's pipe until it ends, until it has given over ``most`` bytes, or until the
    ``deadline``. Return the bytes, and whether the deadline came first. ``watch`` is called at least once
    every PATIENCE milliseconds, and may raise an exception."""
    output, poll = bytearray(), select.poll()  # select() refuses descriptors over 1023
    poll.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = poll.poll(min(left * 1000, PATIENCE))
        watch()
        if ready:
            chunk = os.read(descriptor, 1 << 16)
            output += chunk
            if not chunk or len(output) > most:
                return bytes(output), False
    return bytes(output), True


def hang_up(process: subprocess.Popen[bytes]) -> int:
    """End a child that ``converse`` started, and close its pipes; return the child's exit status."""
    status = end(process)
    for pipe in _pipes(process):
        pipe.close()
    return status


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def ended(process: subprocess.Popen[Any]) -> bool:
    """Whether the child has exited. The child is not reaped, so its process id, which is also its group's id,
    stays reserved."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another thread has just reaped the child
        return True


def _wait(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Wait for the child; return whether it exits within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ended(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def how(status: int) -> str:
    """How a process ended, such as "SIGKILL" or "exit status 1". ``status`` is negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    known = -status in list(signal.Signals)
    return signal.Signals(-status).name if known else f"signal {-status}"  # real-time signals have no names


def end(process: subprocess.Popen[Any]) -> int:
    """Kill the child and all processes of its group, and reap the child; return the child's exit status,
    which is negative if a signal ended the child."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
