"""Tests of the virtual environment for coda-kernels, the package of CODA's authors. The tests really create
the environment, but install a small package in place of coda-kernels."""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import worker_tasks
from checkout import SUPPORT
from comparison_machine import stood_in

from coda_agent.comparison import environment, rows
from coda_agent.comparison.competitors import EAGER, TORCH, UPSTREAM
from coda_agent.comparison.drawing.cells import Cell, Empty, lines
from coda_agent.comparison.measuring import ComparisonRequest, measure
from coda_agent.comparison.results import Results
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.system.subprocesses import output
from coda_agent.verifier.worker import Worker

pytestmark = pytest.mark.slow

NAME, VERSION = "typer", "0.0.1"  # this project uses another version of typer
versions = environment.versions


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder. During the tests, pip looks for packages only in this folder."""
    folder = tmp_path_factory.mktemp("index")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("CODA_AGENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(environment, "PACKAGE", f"{NAME}=={VERSION}")
        yield folder


@pytest.fixture(scope="module")
def installed(index: Path) -> str:
    """Create the environment and return its interpreter."""
    publish(index)
    assert environment.python() is None
    return environment.install()


def publish(folder: Path, name: str = NAME, version: str = VERSION, needs: Sequence[str] = ()) -> None:
    info = f"{name}-{version}.dist-info"
    told = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"own = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *told, ""]))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def purelib(python: str) -> Path:
    return Path(output(python, "-c", environment._PURELIB).strip())


def test_its_package_is_its_own_and_the_rest_is_borrowed(installed: str) -> None:
    assert environment.python() == installed
    assert versions(installed, (NAME, "torch")) == {NAME: VERSION, "torch": torch.__version__}
    # the worker imports its task from SUPPORT
    (purelib(installed) / "tests.pth").write_text(f"{SUPPORT}\n")
    with Worker(python=installed) as worker:
        answer = worker.ask(worker_tasks.environment_of, NAME, patience=60.0)
    assert answer == {"own": VERSION, "torch": torch.__version__}


@pytest.fixture
def carried(installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Copy the environment as if to another machine: the paths in the copy lead nowhere, and pip finds no
    package. Return the copy's interpreter."""
    whence = environment.folder()
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    place = shutil.copytree(whence, environment.folder(), symlinks=True)
    purelib(str(place / "bin" / "python")).joinpath("zz-borrowed.pth").write_text("/nowhere\n")
    (place / "pyvenv.cfg").write_text("home = /nowhere/bin\ninclude-system-site-packages = false\n")
    for name in place.glob("bin/python*"):
        name.unlink()
        name.symlink_to("/nowhere/bin/python")
    python = environment.python()
    assert python and Path(python).is_relative_to(tmp_path)
    return python


def test_one_that_was_carried_is_set_on_what_is_there_without_a_network(carried: str) -> None:
    said = versions(carried, (NAME,))
    assert said == (
        f"its environment does not run, {carried}: No such file or directory: "
        "coda-agent compare --install repairs it"
    )
    assert environment.install() == carried
    versions.cache_clear()  # as in a new process, which has an empty cache
    assert versions(carried, (NAME, "torch")) == {NAME: VERSION, "torch": torch.__version__}


def test_one_that_lacks_its_package_says_so_and_is_mended(
    carried: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.install()
    for path in purelib(carried).glob(f"{NAME}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (purelib(carried) / "zz-borrowed.pth").unlink()
    assert versions(carried, (NAME, "torch", "pip")) == (
        f"{carried} finds no {NAME} and no torch and no pip: coda-agent compare --install repairs it"
    )
    why = rf"{NAME}=={VERSION} could not be installed: .*\n.*\n.*No matching"
    with pytest.raises(InvalidInput, match=why):
        environment.install()
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert versions(environment.install(), (NAME, "pip", "torch"))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Fatal Python error: no codec' >&2; echo '<no Python frame>' >&2; exit 1", "no codec"),
        ("exit 3", "exit status 3"),
    ],
)
def test_an_interpreter_that_fails_gives_its_words(tmp_path: Path, script: str, why: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    said = versions(str(python), (NAME,))
    assert isinstance(said, str) and f"{why}: coda-agent compare --install repairs it" in said


def test_a_broken_environment_is_its_columns_cell_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(tmp_path / "python")
    wanted = tuple(rows.choose_rows(("gemm_swiglu",), ("1B",), everything=False, quick=False))
    for there, why in ((False, "does not run"), (True, "finds no coda-kernels")):
        with stood_in(monkeypatch) as gpu:
            monkeypatch.setattr(environment, "versions", versions)
            monkeypatch.setattr(
                environment, "python", lambda there=there: sys.executable if there else python
            )
            found = measure(ComparisonRequest(wanted, (EAGER, UPSTREAM), 1, 12), Results(), lambda made: None)
            (line,) = lines(found)
            empty = line.cells[UPSTREAM]
            assert isinstance(empty, Empty) and why in empty.reason and "compare --install" in empty.reason
            assert isinstance(line.cells[TORCH], Cell) and len(gpu.sat) == 1


def test_what_goes_ill_with_what_is_borrowed_is_named(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, NAME, "0.0.2", ("torch", "old_kernels"))
    publish(tmp_path, "old_kernels", "1.0", ("torch<2",))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "PACKAGE", f"{NAME}==0.0.2")
    with pytest.raises(InvalidInput) as error:
        environment.install()
    assert "old-kernels 1.0 depends on torch<2" in str(error.value)
    assert environment.python() is None


def test_where_there_is_no_room_for_it_that_is_said(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(
        InvalidInput, match=r"typer==0.0.1 could not be installed: .*Not a directory.*every other"
    ):
        environment.install()
    assert environment.python() is None
