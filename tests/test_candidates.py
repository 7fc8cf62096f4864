"""Several candidates at once: real processes, answered by handoff, stopped, interrupted and killed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from authoring import BROKEN, ROOT, TOY_KERNEL, accepted_run, coda_agent, fenced, make_run, write_toy

from agent import candidates, history, runs
from agent.journal import JournalError, glance

# A suite in the background inherits that SIGINT is ignored.
INTERRUPTIBLE = """
import signal
from agent.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path) -> Path:
    return write_toy(tmp_path)


def options(directory: Path) -> list[str]:
    return ["--candidates", "2", "--provider", "handoff", "--directory", str(directory), "--no-gpu"]


def answer(directory: Path, number: int, text: str) -> None:
    (directory / str(number)).mkdir(parents=True, exist_ok=True)
    draft = directory / str(number) / "draft"
    draft.write_text(text)
    draft.rename(directory / str(number) / "answer-1.md")


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free(name: str) -> bool:
    """Whether no process has the run open."""
    try:
        runs.reopen(name).journal.close()
    except JournalError:
        return False
    return True


def waiting(directory: Path) -> Callable[[], bool]:
    return lambda: all((directory / str(n) / "prompt-1.md").exists() for n in (1, 2))


def test_the_best_of_two(toy: Path, tmp_path: Path) -> None:
    answer(tmp_path / "hands", 1, fenced(BROKEN))
    answer(tmp_path / "hands", 2, fenced(TOY_KERNEL))
    more = ("--attempts", "1", "--budget-tokens", "9001", "--budget-seconds", "500")
    done = coda_agent("generate", toy, *options(tmp_path / "hands"), *more)
    first, second = runs.names()
    assert done.returncode == 0, done.stderr
    assert f"the best: {second}" in done.stdout and f"{first}: rejected trace/python" in done.stdout
    assert "1: rejected at trace: python" in done.stdout and f"coda-agent bundle {second}" in done.stdout
    assert [run.status for run in history.past()] == ["rejected", "checked"]
    for name in (first, second):
        header, _ = glance(runs.runs_dir() / name / "journal.db")
        assert header["limits"] == {"tokens": 4500, "seconds": 500.0}


@contextmanager
def going(toy: Path, directory: Path, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """The command with two candidates that wait for answers."""
    given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | streams
    command = [sys.executable, "-c", INTERRUPTIBLE, "generate", str(toy), *options(directory)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(command, env=environment, **given) as process:  # type: ignore[call-overload]
        try:
            eventually(waiting(directory))
            yield process
        finally:
            process.kill()


def test_ctrl_c_stops_all_and_says_how_to_go_on(toy: Path, tmp_path: Path) -> None:
    with going(toy, tmp_path / "hands") as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    first, second = runs.names()
    assert f"coda-agent resume {first} {second} goes on" in said.decode()
    assert free(first) and free(second)
    for number in (1, 2):
        answer(tmp_path / "hands", number, fenced(TOY_KERNEL))
    done = coda_agent("resume", first, second, "--no-gpu", "--budget-seconds", "100")
    assert done.returncode == 0 and f"the best: {first}" in done.stdout


def test_candidates_end_with_their_parent(toy: Path, tmp_path: Path) -> None:
    with going(toy, tmp_path / "hands") as process:
        assert not any(map(free, runs.names()))
        process.kill()
        process.wait()
        eventually(lambda: all(map(free, runs.names())), 20)


def test_a_key_stops_one_on_a_terminal(toy: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        with going(toy, tmp_path / "hands", stdin=theirs, stdout=theirs, stderr=theirs) as process:
            first, second = runs.names()
            os.write(ours, b"1")
            eventually(lambda: free(first))
            assert not free(second)
            os.write(ours, b"q")
            seen = _read(ours, process)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "a number stops that candidate, q stops all" in seen and second in seen
    assert process.returncode == 3 and "has no verified kernel yet" in seen
    assert [run.status for run in history.past()] == ["authoring", "authoring"]


def _read(terminal: int, process: subprocess.Popen[bytes]) -> str:
    """What a terminal shows until the process ends: read meanwhile, or its buffer fills up."""
    import select

    seen, deadline = b"", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65536)
    while select.select([terminal], [], [], 0.1)[0]:
        seen += os.read(terminal, 65536)
    return seen.decode("utf-8", "replace")


def test_the_table_has_what_journals_tell(toy: Path) -> None:
    from rich.console import Console

    names = [make_run(toy), accepted_run(toy)]
    console = Console(width=200)
    with candidates.started([], []) as none:
        assert none == []
    done = subprocess.Popen(["true"])
    done.wait()
    for name in names:
        (runs.runs_dir() / name / candidates.LOG).write_text("  trace      passed\n\n")
    with console.capture() as capture:
        console.print(candidates.table([candidates.Candidate(i, n, done) for i, n in enumerate(names, 1)]))
    rows = [line.split() for line in capture.get().splitlines()]
    assert rows[1][:3] == ["1", names[0], "checked"] and rows[2][:3] == ["2", names[1], "accepted"]
    assert rows[2][-2:] == ["1.300", "75%"]
    ranked = sorted(map(history.of, names), key=candidates._merit)
    assert [past.run for past in ranked] == names[::-1]
