"""The environment of CODA's own package, made for real, with a small package in its place."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import worker_tasks

from agent.compare import environment
from agent.compare.results import ResultsError
from verifier.gpu import Worker

NAME, VERSION = "typer", "0.0.1"  # one that this project has too, in another version


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds that package and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "PACKAGE", f"{NAME}=={VERSION}")
    return folder


def publish(folder: Path) -> None:
    info = f"{NAME}-{VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"{NAME}-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{NAME}.py", f"own = {VERSION!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_its_package_is_its_own_and_the_rest_is_borrowed(index: Path) -> None:
    publish(index)
    assert environment.python() is None
    python = environment.install()
    assert environment.python() == environment.install() == python
    found = environment.versions(python, (NAME, "torch"))
    assert found == {NAME: VERSION, "torch": torch.__version__}
    purelib = environment._said(python, "-c", environment._PURELIB).strip()
    (Path(purelib) / "tests.pth").write_text(f"{Path(__file__).parent}\n")  # a worker's task is there
    with Worker(python=python) as worker:
        answer = worker.ask(worker_tasks.environment_of, NAME, patience=60.0)
    assert answer == {"own": VERSION, "torch": torch.__version__}


def test_where_there_is_no_room_for_it_that_is_said(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(
        ResultsError, match=r"typer==0.0.1 could not be installed: .*Not a directory.*every other"
    ):
        environment.install()
    assert environment.python() is None


def test_a_question_to_what_is_not_there_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        environment.versions(sys.executable, ("no-such-package",))
