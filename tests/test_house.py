"""What may import what: the layers, the jail's standard library, and the light start of the command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LAYERS, CIRCLES, JAIL = PROJECT["tool"]["importlinter"]["contracts"]
PACKAGES = LAYERS["layers"]
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"
HEAVY = {
    "anthropic",
    "cutlass",
    "genai_prices",
    "httpx2",
    "liger_kernel",
    "matplotlib",
    "mcp",
    "numpy",
    "pydantic",
    "quack",
    "torch",
    "triton",
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def modules_after(code: str, *flags: str) -> set[str]:
    """What a new interpreter has loaded once it has run ``code`` beside the packages."""
    report = "import json; print(json.dumps(sorted(sys.modules)))"
    script = f"import sys; sys.path.append({str(ROOT)!r}); {code}; {report}"
    command = [sys.executable, *flags, "-c", script]
    done = subprocess.run(command, cwd=ROOT.anchor, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def ours(modules: set[str]) -> set[str]:
    return {m for m in modules if m.partition(".")[0] in PACKAGES}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages and their contracts, somewhere a test may break them."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_imports_keep_the_contracts() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("primitives/ir.py", "import verifier.report", LAYERS),
        ("primitives/lower.py", "def late():\n    from agent import journal", LAYERS),
        ("verifier/report.py", "from agent.providers import Turn", LAYERS),
        ("verifier/report.py", "def late():\n    from verifier import measure", CIRCLES),
        ("primitives/ir.py", "def late():\n    import torch", JAIL),
        ("primitives/sandbox.py", "import verifier.report", JAIL),  # which imports pydantic
    ],
)
def test_a_broken_contract_is_named(copy: Path, module: str, line: str, contract: dict[str, Any]) -> None:
    with (copy / module).open("a", encoding="utf-8") as file:
        file.write(f"\n\n{line}\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract['name']} BROKEN" in done.stdout


def test_the_jail_needs_the_standard_library_alone() -> None:
    # -S leaves site-packages out of the path, so that anything else fails to import.
    loaded = modules_after("import verifier.jail_child", "-I", "-S")
    foreign = {m.partition(".")[0] for m in loaded} - sys.stdlib_module_names - set(PACKAGES) - {"__main__"}
    assert not foreign
    # What the jail loads is what the contract guards: no module joins the jail unnoticed.
    packages = {"primitives", "verifier"}
    assert ours(loaded) - packages == set(JAIL["source_modules"])


@pytest.mark.parametrize("name", JAIL["source_modules"])
def test_each_module_of_the_jail_imports_by_itself(name: str) -> None:
    assert name in modules_after(f"import {name}", "-I", "-S")


def test_the_command_starts_light() -> None:
    script = PROJECT["project"]["scripts"]["coda-agent"]
    module, _, function = script.partition(":")
    loaded = modules_after(f"from {module} import {function}")
    assert module in loaded
    assert not {m.partition(".")[0] for m in loaded} & HEAVY
