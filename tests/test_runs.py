"""Runs on disk: names that do not meet, the spec as it was, one process at a time."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from authoring import TOY, make_run, write_toy

from agent import runs
from agent.journal import JournalError
from verifier.spec import SpecError, load

STAMPED = re.compile(r"toy-\d{8}-\d{6}(-\d+)?")


def test_a_run_keeps_what_it_was_started_with(runs_home: Path, tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    run = runs.start(path, {"provider": "handoff", "attempts": 3})
    with run.journal:
        assert STAMPED.fullmatch(run.name) and run.directory == runs_home / run.name
        assert run.text == TOY and (run.directory / "spec.yaml").read_text() == TOY
    path.write_text(TOY.replace("4096", "8192"))
    again = runs.reopen(run.name)
    with again.journal:
        assert (again.text, again.spec) == (TOY, run.spec)
        expected = {"run": run.name, "spec": "toy", "spec_hash": run.spec.hash}
        assert again.journal.header == expected | {"provider": "handoff", "attempts": 3}


def test_runs_of_one_second_have_names_of_their_own(runs_home: Path, tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    names = [make_run(path) for _ in range(4)]
    assert len(set(names)) == 4 and all(STAMPED.fullmatch(name) for name in names)
    assert runs.names() == names  # oldest first


def test_a_bad_spec_starts_nothing(runs_home: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="toy.yaml:5: "):
        runs.start(write_toy(tmp_path, "bf16", "bfloat"), {})
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
    with pytest.raises(JournalError, match=f"there is no run .*the latest are: {known}"):
        runs.reopen(name)


def test_no_runs_at_all(runs_home: Path) -> None:
    with pytest.raises(JournalError, match="the latest are: none"):
        runs.reopen("nothing")


def test_a_run_is_open_once(runs_home: Path, tmp_path: Path) -> None:
    name = make_run(write_toy(tmp_path))
    first = runs.reopen(name)
    with pytest.raises(JournalError, match="in use by another process"):
        runs.reopen(name)
    first.journal.close()
    runs.reopen(name).journal.close()


@pytest.mark.parametrize(
    ("old", "new"), [("4096, N: 4096", "4096, N: 8192"), ("speedup: 1.1", "speedup: 0.9")]
)
def test_a_spec_that_was_edited_is_another(runs_home: Path, tmp_path: Path, old: str, new: str) -> None:
    name = make_run(write_toy(tmp_path))
    write_toy(runs_home / name, old, new).rename(runs_home / name / "spec.yaml")
    with pytest.raises(JournalError, match="spec.yaml: not the spec that the run started with; undo"):
        runs.reopen(name)
    write_toy(runs_home / name, "name: toy\n", "# a comment\nname: toy\n").rename(
        runs_home / name / "spec.yaml"
    )
    runs.reopen(name).journal.close()  # the refusal left nothing locked, and prose may change


def test_a_missing_spec_names_its_file(runs_home: Path, tmp_path: Path) -> None:
    name = make_run(write_toy(tmp_path))
    (runs_home / name / "spec.yaml").unlink()
    with pytest.raises(SpecError, match="spec.yaml: there is no such file"):
        runs.reopen(name)


def test_no_room_for_a_run(runs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(runs, "write_atomic", full)
    with pytest.raises(JournalError, match="No space left on device; make room or set CODA_AGENT_RUNS"):
        runs.start(write_toy(tmp_path), {})


def test_runs_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CODA_AGENT_RUNS", str(tmp_path / "file"))
    with pytest.raises(JournalError, match="choose a directory that can be made and written"):
        runs.start(write_toy(tmp_path), {})


def test_where_runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.runs_dir() == Path(os.environ["CODA_AGENT_RUNS"]) != Path("runs")  # conftest.py sees to it
    monkeypatch.delenv("CODA_AGENT_RUNS")
    assert runs.runs_dir() == Path("runs")


def test_the_spec_of_a_run_is_the_files(runs_home: Path, tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    run = runs.start(path, {})
    run.journal.close()
    assert run.spec == load(path)
