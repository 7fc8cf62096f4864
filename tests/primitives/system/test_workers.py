"""The workers in these tests are real processes. They return the right answers. If a worker dies, hangs or
uses too much memory, only its own task fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkout import PYTHONPATH, ROOT
from waiting import eventually

from coda_agent.primitives.system import subprocesses, workers
from coda_agent.verifier.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_workers")]


@pytest.fixture(autouse=True)
def tasks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PYTHONPATH}{os.pathsep}{Path(__file__).parent}", prepend=os.pathsep)


def positive(number: int) -> bool:
    return number > 0


def dies_of_zero(number: int) -> bool:
    if number == 0:
        os._exit(1)
    print("no answer of mine")
    return True


def raises(number: int) -> bool:
    raise ValueError(number)


def own_process(parent: int) -> bool:
    return os.getpid() != parent and os.getppid() == parent


def hangs(path: str) -> bool:
    """Fork a child, write both process ids to ``path``, and hang together with the child. If ``path`` is
    empty, return at once."""
    if path:
        pids = [os.getpid()]
        forked = os.fork()
        if forked:
            Path(path).write_text(f"{pids[0]} {forked}")
        time.sleep(600)
    return True


def leaves_a_child(path: str) -> bool:
    """Die at once, but leave a child alive. The child holds the pipe for the answer open."""
    forked = os.fork()
    if forked == 0:
        time.sleep(600)
    Path(path).write_text(str(forked))
    os._exit(1)


def allocates(megabytes: int) -> bool:
    return len(bytearray(megabytes << 20)) > 0


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def pids(path: Path) -> list[int]:
    # the wait is long because a worker first imports its modules
    assert eventually(lambda: path.exists() and bool(path.read_text()), seconds=60.0)
    return [int(word) for word in path.read_text().split()]


def test_answers_come_in_the_order_of_the_arguments():
    assert workers.run_all(positive, [1, -1, 2, 0, 3, -5, 7, 8, -9]) == [
        n > 0 for n in (1, -1, 2, 0, 3, -5, 7, 8, -9)
    ]
    assert workers.run_all(own_process, [os.getpid()] * 3) == [True] * 3


def test_a_worker_that_dies_fails_its_task_only():
    assert workers.run_all(dies_of_zero, [1, 0, 2, 0, 0, 3]) == [True, False, True, False, False, True]
    assert workers.run_all(raises, [1]) == [False]
    assert workers.run_all(positive, [1, 2]) == [True, True]


def test_a_worker_that_hangs_is_ended_with_its_children_and_the_next_goes_on(tmp_path: Path):
    path = tmp_path / "hanging"
    start = time.monotonic()
    assert workers.run_all(hangs, ["", str(path), "", ""], seconds=8) == [True, False, True, True]
    assert time.monotonic() - start < 60
    assert len(pids(path)) == 2 and eventually(lambda: not any(map(alive, pids(path))))


def test_a_dead_workers_child_keeps_nobody_waiting(tmp_path: Path):
    path = tmp_path / "left"
    start = time.monotonic()
    assert workers.run_all(leaves_a_child, [str(path)]) == [False]
    assert time.monotonic() - start < 20  # run_all does not wait for the limit of 300 s that a task has
    assert eventually(lambda: not any(map(alive, pids(path))))


def test_a_worker_that_takes_too_much_memory_fails_its_task_only(monkeypatch: pytest.MonkeyPatch):
    # end all workers, so that new workers start with the limit
    workers.run_all(raises, range(workers.count()))
    monkeypatch.setattr(subprocesses, "MEMORY_BYTES", 512 << 20)
    assert workers.run_all(allocates, [64, 1024, 64]) == [True, False, True]


def test_a_task_longer_than_a_pipe_reaches_a_worker_and_not_one_that_hangs(tmp_path: Path):
    long = "x" * (1 << 20)
    assert workers.run_all(len_is, [(long, 1 << 20), (long, 1)]) == [True, False]
    worker = workers._Worker()
    worker.process = worker.start(str(tmp_path))
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert not worker.run((len_is, (long, 1 << 20)), seconds=0.5)
    assert worker.process is None


def len_is(task: tuple[str, int]) -> bool:
    return len(task[0]) == task[1]


def test_one_that_died_idle_is_replaced():
    worker = workers._Worker()
    assert worker.run((positive, 1), seconds=60)
    assert worker.process is not None
    worker.process.kill()
    assert eventually(lambda: worker.process is not None and subprocesses.ended(worker.process))
    assert worker.run((positive, 1), seconds=60)
    worker.end()


SCRIPT = """
import signal, sys, test_workers as t
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
t.workers.run_all(t.hangs, sys.argv[1:])
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, by: signal.Signals):
    """A busy worker cannot notice that its input has ended. Even so, the worker ends if its parent is killed
    or interrupted."""
    path = tmp_path / "hanging"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ["PYTHONPATH"]])}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], env=environment, stderr=subprocess.DEVNULL
    ) as parent:
        worker, forked = pids(path)
        parent.send_signal(by)
        assert parent.wait(10) != 0
    try:
        assert eventually(lambda: not alive(worker))
        assert by == signal.SIGKILL or eventually(lambda: not alive(forked))
    finally:
        # if the parent was killed, Linux signals only the worker, not the worker's child
        if alive(forked):
            os.kill(forked, signal.SIGKILL)


def said_by_script(folder: Path, *lines: str) -> str:
    """Run a script that has no main guard; return its standard output."""
    script = folder / "script.py"
    script.write_text(
        "\n".join(["import os", "from coda_agent.primitives.system.workers import run_all", *lines])
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "QUACK_COMPILE_WORKERS": "2"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.stdout or done.stderr


def test_a_script_without_a_main_guard_can_use_them(tmp_path: Path):
    said = said_by_script(tmp_path, "print(run_all(os.path.isabs, ['/', 'a', '/b']))")
    assert said == "[True, False, True]\n"


def test_a_child_outlives_the_thread_that_started_it():
    with ThreadPoolExecutor(1) as thread:
        child = thread.submit(subprocesses.start, ["sleep", "60"]).result()
    try:
        assert not eventually(lambda: subprocesses.ended(child), seconds=1)
    finally:
        subprocesses.end(child)


def test_a_fork_has_its_own_workers(tmp_path: Path):
    said = said_by_script(
        tmp_path,
        "first, fork = run_all(os.path.isabs, ['/', 'a']), os.fork()",
        "again = run_all(os.path.isabs, ['/', 'a'])",
        "if not fork: os._exit(again != [True, False])",
        "print(first, again, os.waitpid(fork, 0)[1])",
    )
    assert said == "[True, False] [True, False] 0\n"


def test_a_gpu_worker_of_another_environment_is_not_given_our_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the PYTHONPATH of this process, the worker would import packages from that path instead of those
    in its own environment."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    (tmp_path / "quack.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    look = (
        "dict(quack=__import__('importlib.util').util.find_spec('quack').origin, path=__import__('sys').path)"
    )
    with Worker() as worker:
        assert worker.ask(eval, look, patience=60.0)["quack"] == str(tmp_path / "quack.py")
    with Worker(python=str(other)) as worker:
        found = worker.ask(eval, look, patience=60.0)
    assert found["quack"].endswith("site-packages/quack/__init__.py")
    assert str(ROOT / "src") in found["path"] and str(tmp_path) not in found["path"]
