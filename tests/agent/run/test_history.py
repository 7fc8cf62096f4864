"""The state of past runs, read from their journals. Reading a
journal does not disturb the process that has it open."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    fenced,
    make_run,
    measured,
    program_of,
    slow,
    write_toy,
)
from checkout import ROOT
from typer.testing import CliRunner

from coda_agent.agent.cli.main import app
from coda_agent.agent.providers import Turn, Usage
from coda_agent.agent.run import history, run_summary, runs
from coda_agent.agent.run.budget import BudgetLedger, Spent
from coda_agent.agent.storage.journal import Journal, JournalError, glance
from coda_agent.verifier.loading import load


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path) -> Path:
    return write_toy(tmp_path)


def test_a_run_is_listed_as_it_stands(toy: Path) -> None:
    spec = load(toy, check=False)
    program = program_of(spec, TOY_KERNEL)
    names = [make_run(toy), make_run(toy, found=measured(spec, program)), make_run(toy, found=slow(spec))]
    names.append(runs.start(toy, HEADER | {"provider": "handoff", "author": "Ada"}).name)
    found = history.past()
    assert [run.run for run in found] == names
    assert [run.status for run in found] == ["checked", "accepted", "rejected", "authoring"]
    assert [run.why for run in found] == ["", "", "decision/slow", ""]
    assert [run.attempts for run in found] == [1, 1, 1, 0]
    assert {run.spec for run in found} == {"toy"}
    assert all(run.started <= run.ended for run in found)


def test_the_last_attempt_counts_and_tokens_add_up(toy: Path) -> None:
    run = runs.start(toy, HEADER | {"provider": "handoff", "author": "Ada"})
    first = {"status": "rejected", "gate": "trace", "code": "name", "message": "no such name"}
    for number, answer in enumerate((BROKEN, TOY_KERNEL), 1):
        turn = Turn(fenced(answer), Usage(100, 10, 1000, 1), "Ada via a script", "end_turn").to_json()
        run.journal.once(f"answer/{number}", "answer", lambda turn=turn: turn)  # type: ignore[misc]
        if number == 1:
            run.journal.once(
                "report/1", "report", lambda: {"report": first, "program": None, "source": BROKEN}
            )
    (found,) = history.past()  # while this process has the run open
    assert (found.status, found.why, found.attempts) == ("rejected", "trace/name", 2)
    assert found.usage == Usage(200, 20, 2000, 2) and found.author == "Ada via a script"
    run.journal.once("more", "more", dict)  # the journal is still open here
    run.journal.close()


def listed(name: str) -> str:
    """Return a run's row in the table as one line."""
    rows = CliRunner().invoke(app, ["runs"]).output.splitlines()
    return next(" ".join(row.split()) for row in rows if name in row)


def stop(name: str, reason: str, number: int = 1) -> None:
    with Journal.open(runs.runs_dir() / name / runs.JOURNAL) as journal:
        journal.once(f"stopped/{number}", "stopped", lambda: {"reason": reason})


def test_a_run_runs_while_a_process_has_it_and_no_longer(toy: Path) -> None:
    name = make_run(toy)
    stop(name, "no connection; check the network")
    code = f"""
from coda_agent.agent.run import runs
run = runs.reopen({name!r})
print("open", flush=True)
input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"open\n"
        found = history.past_of(name)
        assert (found.running, found.stopped, found.status) == (True, "", "checked")
        assert "checked (running) Ada" in listed(name)
        assert run_summary.read(runs.runs_dir() / name).past == found
        child.send_signal(signal.SIGKILL)
    found = history.past_of(name)
    assert (found.running, found.stopped) == (False, "no connection; check the network")
    assert "checked (stopped: no connection) Ada" in listed(name)
    assert run_summary.read(runs.runs_dir() / name).past == found


def test_what_stopped_a_run_is_told_until_it_goes_on(toy: Path) -> None:
    run = runs.start(toy, HEADER | {"provider": "handoff", "author": "Ada"})
    assert f"{run.name} running Ada" in listed(run.name)
    run.journal.close()
    assert f"{run.name} interrupted: resume it Ada" in listed(run.name)  # as after a kill or a power cut
    stop(run.name, "5 of 4 tokens used; resume the run with a larger --budget-tokens")
    assert f"{run.name} stopped: 5 of 4 tokens used Ada" in listed(run.name)
    with Journal.open(run.directory / runs.JOURNAL) as journal:
        journal.once("prompt", "prompt", lambda: {"system": "", "task": ""})
    assert history.past_of(run.name).stopped == "" and f"{run.name} interrupted: resume it Ada" in listed(
        run.name
    )


def test_what_was_spent_is_the_ledgers_word(toy: Path) -> None:
    """A request that was never answered counts as spending, and so does a void measurement. Both count for
    their run and in the total of all runs."""
    lost, paid = (runs.start(toy, HEADER | {"provider": "anthropic"}) for _ in range(2))
    for run in (lost, paid):
        charge = BudgetLedger(run.journal, turn=1).reserve("claude-opus-5-5", 30_000, 6_311)
        if run is paid:
            charge.settle(Usage(1000, 200))
            seconds = {"reason": "another power limit", "gpu_seconds": 71.5}
            run.journal.once("void/1/0", "void", lambda seconds=seconds: seconds)  # type: ignore[misc]
        run.journal.close()
    first, second = history.past()
    assert (first.spent.tokens, first.spent.uncertain_tokens) == (36_311, 36_311)
    assert second.spent.tokens == 1200 and second.spent.gpu_seconds == 71.5
    both = f"{first.spent.dollars + second.spent.dollars:.2f}"
    assert listed(lost.name).endswith(f"0 ~36,311 ~{first.spent.dollars:.2f} –")
    assert listed(paid.name).endswith(f"0 1,200 {second.spent.dollars:.2f} 72")
    assert listed("2 run(s)") == f"2 run(s) 0 ~37,511 ~{both} 72"
    assert "36,311 tokens, $" in listed("unknown final cost")
    asked = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)
    assert (asked["total"]["runs"], asked["total"]["attempts"]) == (2, 0)
    assert Spent(**asked["total"]["spent"]) == first.spent + second.spent
    assert [Spent(**run["spent"]) for run in asked["runs"]] == [first.spent, second.spent]


def test_runs_are_read_on_a_disk_without_room(toy: Path, runs_home: Path) -> None:
    name = make_run(toy)
    (runs_home / name / "journal.db-shm").symlink_to("journal.db-shm")  # so SQLite cannot create its index
    assert history.past_of(name).status == "checked" and "checked" in listed(name)
    assert "checked" in CliRunner().invoke(app, ["review", name, "--json"]).output


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"no database at all, but long enough to be one" * 9), "journal.db"),
        (lambda path: path.write_bytes(b""), "not a journal of coda-agent"),
    ],
)
def test_a_journal_that_cannot_be_read_hides_no_other(
    toy: Path, runs_home: Path, damage: Callable[[Path], object], words: str
) -> None:
    bad, good = make_run(toy), make_run(toy)
    damage(runs_home / bad / "journal.db")
    found = {run.run: run for run in history.past()}
    assert found[bad].status == "unreadable" and words in found[bad].why
    assert found[good].status == "checked"


def test_a_journal_of_another_version_is_unreadable(toy: Path, runs_home: Path) -> None:
    name = make_run(toy)
    with sqlite3.connect(runs_home / name / "journal.db") as db:
        db.execute("UPDATE events SET payload = ? WHERE key = 'report/1'", ('{"report": {"status": "new"}}',))
    (found,) = history.past()
    assert found.status == "unreadable" and "journal.db: report/1.report: " in found.why


def test_a_journal_is_read_as_it_grows(toy: Path, runs_home: Path) -> None:
    spec = load(toy, check=False)
    name = make_run(toy)
    path = runs_home / name / "journal.db"
    reading = history.Reading(name)
    assert reading.past() == history.past_of(name)
    found = measured(spec, program_of(spec, TOY_KERNEL)).model_dump(mode="json")
    with Journal.open(path) as journal:
        journal.once("measurement/1", "measurement", lambda: found)
        assert reading.past() == history.past_of(name) and reading.past().status == "accepted"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE events SET payload = '{}' WHERE key = 'answer/1'")
    assert history.past_of(name).status == "unreadable"
    assert reading.past().status == "accepted"  # `reading` does not read the event again


def test_a_glance_changes_nothing(toy: Path, runs_home: Path) -> None:
    path = runs_home / make_run(toy) / "journal.db"
    before = path.read_bytes()
    header, events = glance(path)
    assert path.read_bytes() == before
    with Journal.open(path) as journal:
        assert (header, events) == (journal.header, journal.events()) == glance(path)
    with pytest.raises(JournalError, match="no journal here"):
        glance(path.with_name("other.db"))


def test_the_command_lists_for_people_and_programs(toy: Path, runs_home: Path) -> None:
    name = make_run(toy)
    told = CliRunner().invoke(app, ["runs"])
    assert told.exit_code == 0 and name in told.output and "checked" in told.output
    asked = CliRunner().invoke(app, ["runs", "--json"])
    (run,) = json.loads(asked.output)["runs"]
    assert (run["run"], run["status"], run["spec"]) == (name, "checked", "toy")
    # The run below counts as interrupted, because no process has its journal open.
    runs.start(toy, HEADER | {"provider": "handoff", "author": "Ada"}).journal.close()
    told = CliRunner().invoke(app, ["runs"])
    assert "interrupted: resume it" in told.output and "GPU s" not in told.output
    shutil.rmtree(runs_home)
    assert "no runs yet" in CliRunner().invoke(app, ["runs"]).output
    runs_home.write_text("a file")
    told = CliRunner().invoke(app, ["runs"])
    assert isinstance(told.exception, NotADirectoryError)  # the command line explains this error
