"""Rules for imports (the layers, the jail's restriction to the standard library, the command's fast start),
for names of classes, and for docstrings."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LAYERS, CIRCLES, JAIL = PROJECT["tool"]["importlinter"]["contracts"]
PACKAGES = ("agent", "comparison", "fused", "primitives", "verifier")
# files whose text is hashed or recorded, and kernels that are inputs of tests
FROZEN = ("primitives/device", "benchmarks/authoring/operators.py", "tests/honest")
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
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def modules_after(code: str, *flags: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after it has run ``code``."""
    report = "import json; print(json.dumps(sorted(sys.modules)))"
    script = f"import sys; sys.path.append({str(ROOT / 'src')!r}); {code}; {report}"
    command = [sys.executable, *flags, "-c", script]
    done = subprocess.run(command, cwd=ROOT.anchor, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def ours(modules: set[str]) -> set[str]:
    """Return the project's modules among ``modules``, without packages that contain another such module."""
    own = {m for m in modules if m.partition(".")[0] == "coda_agent"}
    return {m for m in own if not any(other.startswith(f"{m}.") for other in own)}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of the packages and of their import contracts. Tests may break the copy."""
    for name in ("pyproject.toml", "__init__.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "coda_agent").symlink_to("..")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_imports_keep_the_contracts() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("primitives/lang/ir.py", "import coda_agent.verifier.report", LAYERS),
        ("primitives/compiler/lower.py", "def late():\n    from coda_agent.agent.run import runs", LAYERS),
        ("verifier/report.py", "from coda_agent.agent.providers import Turn", LAYERS),
        ("verifier/report.py", "def late():\n    from coda_agent.verifier import measure", CIRCLES),
        ("agent/storage/locks.py", "def late():\n    from coda_agent.agent.run import runs", LAYERS),
        ("agent/tips.py", "def late():\n    from coda_agent.agent.prompts import prompt", CIRCLES),
        ("primitives/lang/ir.py", "def late():\n    import torch", JAIL),
        ("primitives/system/sandbox.py", "import coda_agent.verifier.report", JAIL),  # report needs pydantic
    ],
)
def test_a_broken_contract_is_named(copy: Path, module: str, line: str, contract: dict[str, Any]) -> None:
    with (copy / module).open("a", encoding="utf-8") as file:
        file.write(f"\n\n{line}\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract['name']} BROKEN" in done.stdout


def test_the_jail_needs_the_standard_library_alone() -> None:
    # -S removes site-packages from the path, so that other imports fail.
    loaded = modules_after("import coda_agent.verifier.sandbox.jail_child", "-I", "-S")
    foreign = {m.partition(".")[0] for m in loaded} - sys.stdlib_module_names - {"__main__", "coda_agent"}
    assert not foreign
    # The contract must list every module that the jail loads, so that no module joins the jail unnoticed.
    assert ours(loaded) == set(JAIL["source_modules"])


@pytest.mark.parametrize("name", JAIL["source_modules"])
def test_each_module_of_the_jail_imports_by_itself(name: str) -> None:
    assert name in modules_after(f"import {name}", "-I", "-S")


def test_the_command_starts_light() -> None:
    script = PROJECT["project"]["scripts"]["coda-agent"]
    module, _, function = script.partition(":")
    loaded = modules_after(f"from {module} import {function}")
    assert module in loaded
    assert not {m.partition(".")[0] for m in loaded} & HEAVY


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for package in (*PACKAGES, "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.is_relative_to(ROOT / "primitives" / "device"):  # the text of this folder is frozen
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_docstring_opens_with_what() -> None:
    places = (ROOT / folder for folder in (*PACKAGES, "benchmarks", "tests"))
    opened = []
    for path in sorted(path for place in places for path in place.rglob("*.py")):
        if any(path.is_relative_to(ROOT / frozen) for frozen in FROZEN):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if first.partition(" ")[0] in ("What", "Whom", "Who", "Of", "Those"):
                    opened.append(f"{path.relative_to(ROOT)}: {first}")
    assert opened == []
