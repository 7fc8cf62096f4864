"""Runs on disk: distinct names, the spec as it was at the start, one process at a time."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from authoring import BROKEN, HEADER, TOY, Notes, Scripted, fenced, make_run, write_toy
from typer.testing import CliRunner

from coda_agent.agent import setup
from coda_agent.agent.cli.exit_codes import OK, REJECTED
from coda_agent.agent.cli.main import app
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop
from coda_agent.agent.storage import record
from coda_agent.agent.storage.journal import JournalError, read_export
from coda_agent.primitives.errors import Absent
from coda_agent.verifier.loading import load
from coda_agent.verifier.report import REPORT
from coda_agent.verifier.spec.file import SpecError

STAMPED = re.compile(r"toy-\d{8}-\d{6}(-\d+)?")


def test_a_run_keeps_what_it_was_started_with(runs_home: Path, tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    run = runs.start(path, HEADER | {"provider": "handoff", "attempts": 3})
    with run.journal:
        assert STAMPED.fullmatch(run.name) and run.directory == runs_home / run.name
        assert run.text == TOY and (run.directory / "spec.yaml").read_text() == TOY
    path.write_text(TOY.replace("4096", "8192"))
    again = runs.reopen(run.name)
    with again.journal:
        assert (again.text, again.spec) == (TOY, run.spec)
        expected = {"run": run.name, "spec": "toy", "spec_hash": run.spec.hash}
        assert again.journal.header == expected | HEADER | {"attempts": 3}


def test_runs_of_one_second_have_names_of_their_own(runs_home: Path, tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    names = [make_run(path) for _ in range(4)]
    assert len(set(names)) == 4 and all(STAMPED.fullmatch(name) for name in names)
    assert runs.names() == names  # oldest first


def test_a_bad_spec_starts_nothing(runs_home: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="toy.yaml:5: "):
        runs.start(write_toy(tmp_path, "bf16", "bfloat"), HEADER)
    assert not runs_home.exists() and runs.names() == []


def test_a_name_or_a_folder_will_do(runs_home: Path, tmp_path: Path) -> None:
    name = make_run(write_toy(tmp_path))
    for given in (name, f"runs/{name}", f"{runs_home / name}/"):
        run = runs.reopen(given)
        run.journal.close()
        assert run.name == name


@pytest.mark.parametrize("name", ["nothing", "..", ".", "", "/", "a\0b", "-x", "x" * 300, "../../etc"])
def test_an_unknown_run_names_the_latest(runs_home: Path, tmp_path: Path, name: str) -> None:
    known = make_run(write_toy(tmp_path))
    with pytest.raises(JournalError, match=f"there is no run .*the latest runs are {known}"):
        runs.reopen(name)


def test_no_runs_at_all(runs_home: Path) -> None:
    with pytest.raises(
        JournalError, match=f"^{runs_home}: there is no run 'nothing'; this folder has no runs$"
    ):
        runs.reopen("nothing")


def test_a_run_is_open_once(runs_home: Path, tmp_path: Path) -> None:
    name = make_run(write_toy(tmp_path))
    first = runs.reopen(name)
    with pytest.raises(JournalError, match="in use by another process"):
        runs.reopen(name)
    first.journal.close()
    runs.reopen(name).journal.close()


def test_a_run_is_looked_at_while_it_is_open(runs_home: Path, tmp_path: Path) -> None:
    name = make_run(write_toy(tmp_path))
    run = runs.reopen(name)
    with run.journal:
        seen, spec = runs.look(name)
        assert (seen.header, seen.events(), spec) == (run.journal.header, run.journal.events(), run.spec)
        done = CliRunner().invoke(app, ["review", name])
        assert done.exit_code == OK and "gemm(a, b) * per_row(v)" in done.output
        run.journal.once("later", "later", dict)
        assert seen.events() == run.journal.events()[:-1]


def test_a_run_that_may_not_be_read_hides_no_other(
    runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut, run = (runs.start(write_toy(tmp_path), HEADER) for _ in range(2))
    shut.journal.close()
    is_file = Path.is_file

    def refused(path: Path) -> bool:  # like a folder of another user; root may enter every folder
        if path.parent.name == shut.name:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert runs.names() == [shut.name, run.name]
    with pytest.raises(JournalError, match="Permission denied; check who may read"):
        record.glance(runs.folder(shut.name) / runs.JOURNAL)
    run.journal.close()


def test_review_of_a_run_that_has_nothing_yet(runs_home: Path, tmp_path: Path) -> None:
    run = runs.start(write_toy(tmp_path), HEADER)
    with run.journal, pytest.raises(Absent, match="has no verified kernel yet: it is still running"):
        setup.run_result(run.name)
    with pytest.raises(Absent, match=f"no verified kernel yet: coda-agent resume {run.name}"):
        setup.run_result(run.name)


@pytest.mark.usefixtures("no_compiler")
def test_a_run_that_failed_is_exported_even_while_it_goes_on(runs_home: Path, tmp_path: Path) -> None:
    header = HEADER | {"attempts": 1, "directory": "/home/ada/secret project"}
    run, out = runs.start(write_toy(tmp_path), header), tmp_path / "out" / "run.jsonl"
    with run.journal:
        work = assembly.task_of(run)
        outcome = Loop(run.journal, run.spec, work, Scripted([fenced(BROKEN)]), Notes(), attempts=1).run()
        run.journal.once("stopped/1", "stopped", lambda: {"reason": "of 1 dollars are used up"})
        done = CliRunner().invoke(app, ["report", run.name, "--jsonl", str(out)])
        assert done.exit_code == OK and done.output == f"{out}\n"
        header, events = read_export(out)
        assert events == run.journal.events() and events[-1].kind == "stopped"
    assert header == {key: value for key, value in run.journal.header.items() if key != "directory"}
    (judged,) = [event.payload for event in events if event.kind == "report"]
    assert REPORT.validate_python(judged["report"]) == outcome.report and judged["source"] == BROKEN
    assert CliRunner().invoke(app, ["review", run.name]).exit_code == REJECTED
    assert not list(tmp_path.glob("**/*.html"))
    refused = CliRunner().invoke(app, ["report", "nothing", "--jsonl", str(out)])
    assert refused.exit_code != OK and read_export(out)[1] == events


@pytest.mark.parametrize(
    ("old", "new"), [("4096, N: 4096", "4096, N: 8192"), ("speedup: 1.1", "speedup: 0.9")]
)
def test_a_spec_that_was_edited_is_another(runs_home: Path, tmp_path: Path, old: str, new: str) -> None:
    name = make_run(write_toy(tmp_path))
    write_toy(runs_home / name, old, new).rename(runs_home / name / "spec.yaml")
    for open_it in (runs.reopen, runs.look):
        with pytest.raises(JournalError, match="spec.yaml: the spec has changed since the run started; undo"):
            open_it(name)
    write_toy(runs_home / name, "name: toy\n", "# a comment\nname: toy\n").rename(
        runs_home / name / "spec.yaml"
    )
    runs.reopen(name).journal.close()  # the refusal left no lock; comments of a spec may change


def test_a_missing_spec_names_its_file(runs_home: Path, tmp_path: Path) -> None:
    name = make_run(write_toy(tmp_path))
    (runs_home / name / "spec.yaml").unlink()
    with pytest.raises(SpecError, match="spec.yaml: no such file"):
        runs.reopen(name)


def test_no_room_for_a_run(runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(runs, "write_atomic", full)
    with pytest.raises(
        JournalError, match="No space left on device; free disk space, or set CODA_AGENT_RUNS"
    ):
        runs.start(write_toy(tmp_path), HEADER)


def test_runs_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CODA_AGENT_RUNS", str(tmp_path / "file"))
    with pytest.raises(JournalError, match="choose a writable directory"):
        runs.start(write_toy(tmp_path), HEADER)


def test_where_runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.runs_dir() == Path(os.environ["CODA_AGENT_RUNS"]) != Path("runs")  # set by conftest.py
    monkeypatch.delenv("CODA_AGENT_RUNS")
    assert runs.runs_dir() == Path("runs")


def test_the_spec_of_a_run_is_the_files(runs_home: Path, tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    run = runs.start(path, HEADER)
    run.journal.close()
    assert run.spec == load(path)
