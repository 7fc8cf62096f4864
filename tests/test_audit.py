"""The audit of the whole session hears a candidate that runs outside the jail: planted ones, all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import candidate_watch
import pytest
from candidate_watch import DIRECTORY, Account, account

from primitives.dims import Dim
from primitives.ir import Signature, TensorType
from primitives.trace import trace_source
from verifier import jail

ROOT = Path(__file__).parent.parent
KERNEL = '''from primitives import gemm, kernel

@kernel
def plain(x, w):
    """A candidate like any other."""
    return {"o": gemm(x, w)}
'''
M, K, N = (Dim.parse(name) for name in "MKN")
SIGNATURE = Signature(
    "plain",
    ("M", "K", "N"),
    {"x": TensorType((M, K), "bf16"), "w": TensorType((K, N), "bf16")},
    {"o": TensorType((M, N), "bf16")},
)
# A module that passes for one of the verifier's, and what the tests below need of it.
PLANTED = """
import ast, importlib.util, sys
def run(text):
    exec(text, {})
def evaluate(text):
    exec(compile(ast.parse(text), "kernel.py", "exec"), {})
def call(function, text):
    return function(text)
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
SETTING = """
import sys, types
planted = types.ModuleType("verifier.planted")
exec(compile(open(sys.argv[1]).read(), "planted.py", "exec"), planted.__dict__)
text = open(sys.argv[2]).read()
import json, primitives
from primitives.ir import Signature
from primitives.trace import trace_source
from verifier import jail
signature = Signature.from_json(json.loads(sys.argv[3]))
trace = lambda: jail.trace(text, signature)
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The planted module, a kernel file and a directory for logs."""
    planted, kernel, logs = tmp_path / "planted.py", tmp_path / "kernel.py", tmp_path / "logs"
    planted.write_text(PLANTED)
    kernel.write_text(KERNEL)
    logs.mkdir()
    return planted, kernel, logs


def heard(files: tuple[Path, Path, Path], *codes: str) -> Account:
    """What the audit says of processes that run ``codes``, one after another."""
    planted, kernel, logs = files
    environment = os.environ | {DIRECTORY: str(logs)}
    arguments = [str(planted), str(kernel), json.dumps(SIGNATURE.to_json())]
    for code in codes:
        command = [sys.executable, "-c", SETTING + code, *arguments]
        subprocess.run(command, env=environment, check=True, timeout=60)
    return account(logs)


@pytest.mark.parametrize(
    "codes",
    [
        ["trace(); planted.run(text)"],
        ["planted.run(text); trace()"],
        ["trace()", "planted.run(text)"],  # in two processes
        ["planted.run(text)", "trace()"],
        ["trace(); planted.evaluate(text)"],  # by way of a syntax tree
        ["trace(); planted.run('x = 1\\n' + text + '\\ny = 2')"],
        ["trace(); planted.load(sys.argv[2])"],
        ["import py_compile; py_compile.compile(sys.argv[2]); trace()", "planted.load(sys.argv[2])"],
    ],
)
def test_a_candidate_outside_the_jail_is_heard(files: tuple[Path, Path, Path], codes: list[str]) -> None:
    found = heard(files, *codes)
    assert len(found.candidates) == 1 and found.processes == len(codes)
    assert found.violations and all("planted.py:" in v for v in found.violations)


def test_a_test_that_traces_its_own_kernel_is_no_violation(files: tuple[Path, Path, Path]) -> None:
    found = heard(files, "trace(); trace_source(text, signature); exec(text, {}); planted.run('x = 1')")
    assert len(found.candidates) == 1 and not found.violations


def stands_in(text: str) -> None:
    trace_source(text, SIGNATURE)


def test_a_test_that_stands_in_for_the_jail_is_no_violation(files: tuple[Path, Path, Path]) -> None:
    ours = f"sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_audit import stands_in"
    found = heard(files, f"{ours}; trace(); planted.call(stands_in, text)")
    assert len(found.candidates) == 1 and not found.violations


def test_a_child_with_an_environment_of_its_own_is_watched(files: tuple[Path, Path, Path]) -> None:
    found = heard(files, "import subprocess; subprocess.run([sys.executable, '-c', ''], env={}, check=True)")
    assert found.processes == 2


def test_the_jails_own_child_holds_no_hook(files: tuple[Path, Path, Path]) -> None:
    """It is the one place where candidates run, and its 50 ms are no time for one."""
    assert heard(files, "trace()").processes == 1


def test_this_very_process_is_watched() -> None:
    directory = Path(os.environ[DIRECTORY])
    source = KERNEL.replace("any other", f"no other than {os.getpid()}")
    assert isinstance(jail.trace(source, SIGNATURE), jail.Traced)
    trace_source(source, SIGNATURE)
    log = (directory / f"{os.getpid()}.log").read_text()
    assert log.startswith("watched\n")
    assert f"candidate\t{candidate_watch._digest(source.strip().encode())}\n" in log


SUITE = """
import sys, types
import test_audit as t
def test_it():
    planted = types.ModuleType("verifier.planted")
    exec(t.PLANTED, planted.__dict__)
    t.jail.trace(t.KERNEL, t.SIGNATURE)
    planted.run(%s)
"""


@pytest.mark.parametrize(
    ("text", "status", "words"), [("t.KERNEL", 1, "1 ran outside"), ("'x = 1'", 0, "nothing")]
)
def test_a_violation_fails_a_session_whose_tests_pass(
    tmp_path: Path, text: str, status: int, words: str
) -> None:
    (tmp_path / "test_planted.py").write_text(SUITE % text)
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        str(tmp_path),
    ]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}  # a session, no xdist worker
    done = subprocess.run(
        command, env=own | {"PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == status and f"{words} " in done.stdout, done.stdout
    assert "audit: 1 candidates" in done.stdout
