"""Several candidates at once, in real processes, with the handoff provider as author. The tests interrupt
and kill these processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from attending import PATIENCE, expect, going, terminal
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    accepted_run,
    coda_agent,
    fenced,
    make_run,
    measured,
    program_of,
    slow,
    write_toy,
)
from typer.testing import CliRunner

from coda_agent.agent.cli.authoring import create_runs
from coda_agent.agent.cli.main import app
from coda_agent.agent.reporting import candidates_view
from coda_agent.agent.run import candidates, history, runs
from coda_agent.agent.storage.journal import JournalError, glance
from coda_agent.verifier.loading import load

pytestmark = pytest.mark.slow


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path) -> Path:
    return write_toy(tmp_path)


def options(directory: Path) -> list[str]:
    return ["--candidates", "2", "--provider", "handoff", "--directory", str(directory), "--no-gpu"]


def answer(directory: Path, number: int, text: str) -> None:
    (directory / str(number)).mkdir(parents=True, exist_ok=True)
    draft = directory / str(number) / "draft"
    draft.write_text(f"{text}\n<!-- end -->\n")
    draft.rename(directory / str(number) / "answer-1.md")


def free(name: str) -> bool:
    """Return whether no process has the run open."""
    try:
        runs.reopen(name).journal.close()
    except JournalError:
        return False
    return True


def test_the_best_of_two(toy: Path, tmp_path: Path) -> None:
    answer(tmp_path / "hands", 1, fenced(BROKEN))
    answer(tmp_path / "hands", 2, fenced(TOY_KERNEL))
    more = ("--attempts", "1", "--budget-gpu-seconds", "90", "--budget-seconds", "500")
    done = coda_agent("generate", toy, *options(tmp_path / "hands"), *more)
    first, second = runs.names()
    assert done.returncode == 0, done.stderr
    assert f"best run: {second}" in done.stdout and f"{first}: rejected trace/python" in done.stdout
    assert "1: rejected at trace: python" in done.stdout and f"coda-agent bundle {second}" in done.stdout
    assert [run.status for run in history.past()] == ["rejected", "checked"]
    for name in (first, second):
        header, _ = glance(runs.runs_dir() / name / "journal.db")
        assert header["limits"] == {"gpu_seconds": 45.0, "seconds": 500.0}
        assert header["candidates"] == 2 and header.get("group", name) == first
    told = json.loads(CliRunner().invoke(app, ["report", second, "--json"]).output)
    assert [run["run"] for run in told["runs"]] == [first, second]
    assert [run["strategy"]["candidate"] for run in told["runs"]] == [1, 2]


def two(toy: Path, directory: Path, **streams: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Start ``coda-agent generate`` with two candidates. The ``with`` block begins when both candidates wait
    for an answer."""
    prompts = [directory / str(number) / "prompt-1.md" for number in (1, 2)]
    return going(["generate", toy, *options(directory)], prompts, **streams)


def test_ctrl_c_stops_all_and_says_how_to_go_on(toy: Path, tmp_path: Path) -> None:
    with two(toy, tmp_path / "hands") as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    first, second = runs.names()
    assert f"continue with: coda-agent resume {first} {second}" in said.decode()
    assert free(first) and free(second)
    for number in (1, 2):
        answer(tmp_path / "hands", number, fenced(TOY_KERNEL))
    done = coda_agent("resume", first, second, "--no-gpu", "--budget-seconds", "100")
    assert done.returncode == 0 and f"best run: {first}" in done.stdout


@pytest.mark.parametrize("number", [1, 2])
def test_one_that_may_not_ask_says_why(toy: Path, tmp_path: Path, number: int) -> None:
    more = ("--candidates", str(number), "--budget-seconds", "0")
    done = coda_agent("generate", toy, *options(tmp_path / "hands"), *more)
    assert done.returncode == 1 and len(runs.names()) == number, done.stderr
    why = r"0.\d+ of 0 seconds used; resume the run with a larger --budget-seconds\n"
    for name in runs.names():
        told = f"coda-agent: {why}" if number == 1 else f"{name}: authoring, stopped: {why}"
        assert re.search(told, done.stdout + done.stderr)


def test_one_that_is_killed_says_so(toy: Path, tmp_path: Path) -> None:
    from rich.console import Console

    names = create_runs(partial(runs.start, toy), HEADER | {"directory": str(tmp_path / "hands")}, 2)
    with candidates.started(names, ["--no-gpu"]) as started:
        expect(lambda: all((tmp_path / "hands" / n / "prompt-1.md").exists() for n in "12"))
        for candidate in started:
            candidate.process.kill()
        ended = candidates_view.attend(started, Console())
    assert [(e.past.run, e.past.stopped, e.status) for e in ended] == [
        (name, "killed by SIGKILL", -signal.SIGKILL) for name in names
    ]


def test_candidates_end_with_their_parent(toy: Path, tmp_path: Path) -> None:
    with two(toy, tmp_path / "hands") as process:
        assert not any(map(free, runs.names()))
        process.kill()
        process.wait()
        expect(lambda: all(map(free, runs.names())))


def test_a_terminal_shows_them_until_ctrl_c(toy: Path, tmp_path: Path) -> None:
    with terminal() as screen, two(toy, tmp_path / "hands", **screen.streams) as process:
        first, second = runs.names()
        expect(lambda: first in screen.seen and second in screen.seen, process)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"continue with: coda-agent resume {first} {second}" in screen.seen
    assert [run.status for run in history.past()] == ["authoring", "authoring"]


def test_the_table_has_what_journals_tell(toy: Path) -> None:
    from rich.console import Console

    spec = load(toy, check=False)
    rows = measured(spec, program_of(spec, TOY_KERNEL), 0.9).timings
    evidence = {"timings": [t.model_dump(mode="json", exclude={"samples"}) for t in rows]}
    too_slow = slow(spec).model_copy(update={"evidence": evidence})
    names = [make_run(toy), accepted_run(toy), make_run(toy, found=too_slow)]
    console = Console(width=200)
    with candidates.started([], []) as none:
        assert none == []
    done = subprocess.Popen(["true"])
    done.wait()
    for name in names:
        (runs.runs_dir() / name / candidates.LOG).write_text("  trace      passed\n\n")
    with console.capture() as capture:
        console.print(
            candidates_view.table(
                [candidates.Candidate(i, history.Reading(n), done) for i, n in enumerate(names, 1)]
            )
        )
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[1][:3] == ["1", names[0], "checked"] and lines[2][:3] == ["2", names[1], "accepted"]
    assert lines[2][-3:] == ["2.000", "1.300", "7%"]
    assert lines[3][:3] == ["3", names[2], "rejected"]
    assert lines[3][-3:] == ["(2.000)", "(0.900)", "(7%)"]
    assert "in parentheses: measured, but not accepted" in capture.get()
    ranked = sorted(map(history.past_of, names), key=candidates.merit)
    assert [past.run for past in ranked] == [names[1], names[0], names[2]]
