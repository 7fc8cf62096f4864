"""Failures of GPU work harm only the worker process that does the work. These tests use real workers that
crash, hang, forge answers and leave orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_tasks as tasks
from checkout import PYTHONPATH

from coda_agent.primitives.errors import Absent
from coda_agent.verifier import worker as gpu
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.sanitizer import errors
from coda_agent.verifier.worker import Lost, Worker, WorkerError

PATIENCE = 60.0  # seconds; a worker first has to import PyTorch


@pytest.fixture(scope="module", autouse=True)
def the_tests_tasks() -> Iterator[None]:
    """Put the tests' folders on PYTHONPATH, so that workers can import the tasks."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([PYTHONPATH, *filter(None, [before])])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_a_worker_answers_reports_and_outlives_what_fails(worker: Worker) -> None:
    heard: list[tuple[str, str]] = []
    answer = worker.ask(tasks.double, 4, patience=PATIENCE, progress=lambda *words: heard.append(words))
    assert answer["twice"] == 8 and answer["process"] != os.getpid()
    assert heard == [("numerics", "doubling 4")]
    with pytest.raises(Failed, match="too far off") as failed:
        worker.ask(tasks.fail, "too far off", patience=PATIENCE)
    assert not isinstance(failed.value, Lost)
    assert (failed.value.code, failed.value.evidence) == ("numerics", {"outputs": [1, 2]})
    again = worker.ask(tasks.double, 5, patience=PATIENCE)
    assert again == {"twice": 10, "process": answer["process"]}  # the same process
    assert worker.ask(tasks.chatter, None, patience=2.0) == {"forged": False}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("CUDA error: an illegal memory access was encountered", "illegal_address"),
        ("CUDA Error: cudaErrorMisalignedAddress: misaligned address", "illegal_address"),
        ("cudaErrorLaunchFailure: unspecified launch failure", "device_error"),
    ],
)
def test_what_the_device_says_is_told_from_our_bugs(words: str, code: str) -> None:
    assert gpu._outcome(tasks.cuda_error, words) == {"lost": [code, words]}
    assert "RuntimeError: shapes differ" in gpu._outcome(tasks.cuda_error, "shapes differ")["bug"]


def test_a_device_that_is_of_no_more_use_loses_the_worker(worker: Worker) -> None:
    pid = worker.ask(tasks.double, 1, patience=PATIENCE)["process"]
    with pytest.raises(Lost, match="illegal memory access"):
        worker.ask(tasks.cuda_error, "CUDA error: an illegal memory access", patience=PATIENCE)
    assert gone(pid)


def test_a_crash_is_told_with_its_signal_and_last_words(worker: Worker) -> None:
    with pytest.raises(Lost, match="SIGSEGV.*last words") as lost:
        worker.ask(tasks.crash, signal.SIGSEGV, patience=PATIENCE)
    assert lost.value.code == "crashed"


def test_leaving_is_crashing(worker: Worker) -> None:
    with pytest.raises(Lost, match="exit status 0"):
        worker.ask(tasks.leave, 0, patience=PATIENCE)
    with pytest.raises(Lost, match="died"), Worker() as another:
        another.ask(tasks.leave, 7, patience=PATIENCE)


def test_a_hang_is_ended_with_all_that_it_started(worker: Worker) -> None:
    heard: list[str] = []
    worker.ask(tasks.double, 1, patience=PATIENCE)  # wait until the worker is up
    start = time.monotonic()
    with pytest.raises(Lost, match="silent for 1 s") as lost:
        worker.ask(tasks.orphan, None, patience=1.0, progress=lambda gate, words: heard.append(words))
    assert lost.value.code == "hung" and time.monotonic() - start < 10
    assert gone(int(heard[0]))


def test_our_own_bug_is_an_exception_with_its_traceback(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*KeyError: 'ours'"):
        worker.ask(tasks.bug, None, patience=PATIENCE)


def test_no_kernel_is_blamed_for_a_worker_that_died_before_it_was_asked(worker: Worker) -> None:
    """Three workers die. The first is killed while it waits for a task; ``early`` and ``late`` fail to import
    a module. ``early`` receives its task before the import fails, ``late`` afterwards."""
    os.kill(worker._process.pid, signal.SIGKILL)
    assert gone(worker._process.pid)
    with pytest.raises(WorkerError, match="before its first task"):
        worker.ask(tasks.double, 1, patience=PATIENCE)
    with Worker(ahead=("no_such_module",)) as early, Worker(ahead=("no_such_module",)) as late:
        with pytest.raises(WorkerError, match="No module named 'no_such_module'"):
            early.ask(tasks.double, 1, patience=PATIENCE)
        assert gone(late._process.pid)
        with pytest.raises(WorkerError, match="No module named 'no_such_module'"):
            late.ask(tasks.double, 1, patience=PATIENCE)


def test_a_library_that_does_not_load_ahead_costs_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a library fails to load ahead of the tasks, the worker still runs its tasks. Only the arm that needs
    the library will report the failure."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    with Worker(ahead=("coda_agent.comparison.competitors.ahead",)) as broken:
        assert broken.ask(tasks.double, 4, patience=PATIENCE)["twice"] == 8


def test_a_worker_ends_with_its_asker() -> None:
    code = (
        "import worker_tasks as tasks, os; from coda_agent.verifier.worker import Worker; w = Worker();"
        "print(w.ask(tasks.double, 1, patience=60.0)['process'], flush=True);"
        "w.ask(tasks.hang, None, patience=600.0)"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    pid = int(asker.stdout.readline())
    asker.kill()
    asker.wait()
    asker.stdout.close()
    assert gone(pid)


SANITIZER = """#!/bin/sh
while [ "$1" != "{python}" ]; do [ "$1" = --log-file ] && log=$2; shift; done
"$@"
{report} > "$log"
exit {status}
"""


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, report: str, status: int) -> None:
    """Put a fake compute-sanitizer on the PATH, because the real program needs a GPU. The fake starts a real
    worker, writes its report to the log file, and exits with ``status``."""
    script = directory / "compute-sanitizer"
    script.write_text(SANITIZER.format(python=sys.executable, report=report, status=status))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("report", "status", "words"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", 0, ""),
        ("printf '========= Invalid __global__ write\n========= ERROR SUMMARY: 3 errors\n'", 1,
         "found 3 error.*Invalid __global__ write"),
        ("true", 0, "it said nothing"),
    ],
)  # fmt: skip
def test_a_sanitizer_s_summary_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, status: int, words: str
) -> None:
    stand_in(tmp_path, monkeypatch, report, status)
    if not words:
        assert errors("memcheck", tasks.double, 2) == 0
        return
    with pytest.raises(Failed, match=words) as failed:
        errors("memcheck", tasks.double, 2)
    assert failed.value.code == "sanitizer"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("printf '========= Invalid __global__ write\n========= ERROR SUMMARY: 1 error\n'",
         "found 1 error.*Invalid __global__ write"),
        ("echo '========= ERROR SUMMARY: 0 errors'", "the kernel crashed: .*unspecified launch failure"),
    ],
)  # fmt: skip
def test_a_sanitizer_has_the_word_where_a_kernel_breaks_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, words: str
) -> None:
    """If a kernel makes an illegal access, the sanitizer ends the kernel, and the task fails. The sanitizer
    writes its report only later, when the process ends. If the report names errors, the message does too."""
    stand_in(tmp_path, monkeypatch, report, 1)
    with pytest.raises(Failed, match=words) as failed:
        errors("memcheck", tasks.cuda_error, "CUDA error: unspecified launch failure")
    assert failed.value.code == "sanitizer"


@pytest.mark.parametrize(
    ("task", "words", "error"),
    [(tasks.bug, "ours", WorkerError), (tasks.fail, "no such schedule", Failed)],
)
def test_what_is_no_cuda_error_is_not_the_sanitizers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: Callable[..., dict[str, Any]],
    words: str,
    error: type[Exception],
) -> None:
    stand_in(tmp_path, monkeypatch, "echo '========= ERROR SUMMARY: 0 errors'", 0)
    with pytest.raises(error, match=words):
        errors("memcheck", task, words)


def test_without_a_sanitizer_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Absent, match="CUDA toolkit"):
        errors("memcheck", tasks.double, 2)
