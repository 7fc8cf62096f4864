"""Build the wheel from a copy of the checkout, inspect the wheel, and run commands of the installed wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

import pytest
from checkout import ROOT

from coda_agent.agent.extras import EXTRAS, remedy

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("agent", "comparison", "fused", "primitives", "verifier")
PARTS = (*PACKAGES, "generated_kernels", "specs")
FILES = ("LICENSE", "README.md", "__init__.py", "pyproject.toml", "tips_log.md")
COMMAND = [sys.executable, "-m", "coda_agent.agent.cli.main"]
DATA = (
    *("generated_kernels/*.json", "generated_kernels/*.py", "specs/*.yaml", "specs/primitives/*"),
    *("agent/recordings/*.jsonl", "agent/prompts/pack/*", "agent/prompts/examples/*", "tips_log.md"),
    *("agent/reporting/templates/*", "fused/tuned/*.json"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    at = tmp_path_factory.mktemp("wheel")
    for name in FILES:
        shutil.copy(ROOT / name, at)
    for part in PARTS:
        shutil.copytree(ROOT / part, at / part, ignore=shutil.ignore_patterns("__pycache__"))
    (at / "src").mkdir()
    (at / "src" / "coda_agent").symlink_to("..")
    pip("wheel", "--no-build-isolation", "--wheel-dir", at / "out", at)
    (built,) = (at / "out").iterdir()
    return ZipFile(built)


def pip(command: str, *more: object) -> None:
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        command,
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*line, *map(str, more)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(wheel: ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel. Its dependencies are those of this interpreter."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", folder, wheel.filename)
    return folder


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return BytesParser().parsebytes(wheel.read(name))


def test_one_name_lands_in_site_packages(wheel: ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"coda_agent"}


def test_every_module_and_data_file_is_in_it(wheel: ZipFile) -> None:
    modules = [p for part in PACKAGES for p in (ROOT / part).rglob("*.py")]
    data = [found for pattern in DATA for found in ROOT.glob(pattern)]
    assert len(modules) > 150 and len(data) > 200
    wanted = {f"coda_agent/{path.relative_to(ROOT).as_posix()}" for path in (*modules, *data)}
    assert wanted <= set(wheel.namelist())


def test_the_metadata_has_licence_command_and_extras(wheel: ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    names = wheel.namelist()
    (licence,) = (name for name in names if name.endswith("/licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"coda-agent = coda_agent.agent.cli.main:main" in wheel.read(entry)
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_every_extra_holds_the_packages_that_a_missing_import_names_it_for() -> None:
    declared = {
        extra: {wish.partition(">")[0].replace("-python", "").replace("-", "_") for wish in wishes}
        for extra, wishes in PROJECT["optional-dependencies"].items()
    }
    named = defaultdict(set)
    for package, extra in EXTRAS.items():
        named[extra].add(package)
    named["author"] -= {"anyio", "mcp_types"}  # installed together with mcp
    assert {extra: declared[extra] for extra in named} == named
    assert remedy(ModuleNotFoundError(name="nobody_knows")) is None


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("anthropic", "author", ("generate", "gemm_swiglu", "--provider", "anthropic")),
        ("mcp", "author", ("mcp",)),
        ("anyio", "author", ("mcp",)),
    ],
)
def test_a_missing_extra_is_one_line_with_its_remedy(
    tmp_path: Path, package: str, extra: str, words: tuple[str, ...]
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no', name={package!r})\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path, "ANTHROPIC_API_KEY": "none"}
    done = subprocess.run(
        [*COMMAND, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert f"'{package}'" in line and line.endswith(f"pip install 'coda-agent[{extra}]'")


@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("show", "gemm_swiglu"),
        ("prompt", "gemm_swiglu"),
        ("generate", "gemm_swiglu", "--no-gpu"),
        ("verify", "gemm_swiglu", "--no-gpu"),
    ],
)
def test_the_installed_wheel_knows_a_shipped_name(
    tmp_path: Path, installed: Path, words: tuple[str, ...]
) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed), "CODA_AGENT_RUNS": str(tmp_path / "runs")}
    environment.pop("ANTHROPIC_API_KEY", None)  # generate then replays a recording
    done = subprocess.run(
        [*COMMAND, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
