"""Past runs as journals tell them: how each stands, and none is taken from whoever has it open."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from authoring import BROKEN, TOY_KERNEL, fenced, make_run, measured, program_of, slow, write_toy
from typer.testing import CliRunner

from agent import history, runs
from agent.cli import app
from agent.journal import Journal, JournalError, glance
from agent.providers import Turn, Usage
from verifier.spec import load


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path) -> Path:
    return write_toy(tmp_path)


def test_a_run_is_listed_as_it_stands(toy: Path) -> None:
    spec = load(toy, check=False)
    program = program_of(spec, TOY_KERNEL)
    names = [make_run(toy), make_run(toy, found=measured(spec, program)), make_run(toy, found=slow(spec))]
    names.append(runs.start(toy, {"provider": "handoff", "author": "Ada"}).name)
    found = history.past()
    assert [run.run for run in found] == names
    assert [run.status for run in found] == ["checked", "accepted", "rejected", "authoring"]
    assert [run.why for run in found] == ["", "", "decision/slow", ""]
    assert [run.attempts for run in found] == [1, 1, 1, 0]
    assert {run.spec for run in found} == {"toy"}
    assert all(run.started <= run.ended for run in found)


def test_the_last_attempt_counts_and_tokens_add_up(toy: Path) -> None:
    run = runs.start(toy, {"provider": "handoff", "author": "Ada"})
    first = {"status": "rejected", "gate": "trace", "code": "name", "message": "no such name"}
    for number, answer in enumerate((BROKEN, TOY_KERNEL), 1):
        turn = Turn(fenced(answer), Usage(100, 10, 1000, 1), "Ada via a script", "end_turn").to_json()
        run.journal.once(f"answer/{number}", "answer", lambda turn=turn: turn)  # type: ignore[misc]
        if number == 1:
            run.journal.once(
                "report/1", "report", lambda: {"report": first, "program": None, "source": BROKEN}
            )
    (found,) = history.past()  # while it is open here
    assert (found.status, found.why, found.attempts) == ("rejected", "trace/name", 2)
    assert found.usage == Usage(200, 20, 2000, 2) and found.author == "Ada via a script"
    run.journal.once("more", "more", dict)  # looking took nothing away
    run.journal.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"no database at all, but long enough to be one" * 9), "journal.db"),
        (lambda path: path.write_bytes(b""), "no journal of coda-agent"),
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
    assert (found.status, found.why) == ("unreadable", "written by another version of coda-agent")


def test_a_journal_is_read_as_it_grows(toy: Path, runs_home: Path) -> None:
    spec = load(toy, check=False)
    name = make_run(toy)
    path = runs_home / name / "journal.db"
    reading = history.Reading(name)
    assert reading.past() == history.of(name)
    found = measured(spec, program_of(spec, TOY_KERNEL)).model_dump(mode="json")
    with Journal.open(path) as journal:
        journal.once("measurement/1", "measurement", lambda: found)
        assert reading.past() == history.of(name) and reading.past().status == "accepted"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE events SET payload = '{}' WHERE key = 'answer/1'")
    assert history.of(name).status == "unreadable"
    assert reading.past().status == "accepted"  # what was read is not read again


def test_a_glance_changes_nothing(toy: Path, runs_home: Path) -> None:
    path = runs_home / make_run(toy) / "journal.db"
    before = path.read_bytes()
    header, events = glance(path)
    assert path.read_bytes() == before
    with Journal.open(path) as journal:
        assert (header, events) == (journal.header, journal.events()) == glance(path)
    with pytest.raises(JournalError, match="there is no journal"):
        glance(path.with_name("other.db"))


def test_the_command_lists_for_people_and_programs(toy: Path, runs_home: Path) -> None:
    name = make_run(toy)
    told = CliRunner().invoke(app, ["runs"])
    assert told.exit_code == 0 and name in told.output and "checked" in told.output
    asked = CliRunner().invoke(app, ["runs", "--json"])
    (run,) = json.loads(asked.output)["runs"]
    assert (run["run"], run["status"], run["spec"]) == (name, "checked", "toy")
    shutil.rmtree(runs_home)
    assert "no runs yet" in CliRunner().invoke(app, ["runs"]).output
