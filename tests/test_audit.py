"""The audit of the test session reports every candidate that runs outside the jail. These tests plant such
candidates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import candidate_watch
import pytest
from candidate_watch import DIRECTORY, Account, account
from checkout import PYTHONPATH

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.verifier.sandbox import jail

pytestmark = pytest.mark.slow

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
# A module that poses as a module of the verifier. The tests below call its functions.
PLANTED = """
import ast, importlib.util, sys
def run(text):
    exec(text, {})
def evaluate(text):
    exec(compile(ast.parse(text), "kernel.py", "exec"), {})
def call(function, text):
    return function(text)
def start(text):
    import subprocess
    subprocess.run([sys.executable, "-c", "import sys; exec(sys.argv[1], {})", text], check=True)
def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
SETTING = """
import ast, sys, types
from concurrent.futures import ThreadPoolExecutor
planted = types.ModuleType("coda_agent.verifier.planted")
exec(compile(open(sys.argv[1]).read(), "planted.py", "exec"), planted.__dict__)
text = open(sys.argv[2]).read()
import json, coda_agent.primitives
from coda_agent.primitives.lang.ir import Signature
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.verifier.sandbox import jail
signature = Signature.from_json(json.loads(sys.argv[3]))
trace = lambda: jail.trace(text, signature)
sys.modules["primitives"] = coda_agent.primitives  # as a kernel imports it
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return the paths of the planted module, a kernel file and a directory for logs."""
    planted, kernel, logs = tmp_path / "planted.py", tmp_path / "kernel.py", tmp_path / "logs"
    planted.write_text(PLANTED)
    kernel.write_text(KERNEL)
    logs.mkdir()
    return planted, kernel, logs


def heard(files: tuple[Path, Path, Path], *codes: str) -> Account:
    """Run each of ``codes`` in its own process, one after another; return the audit's account of these
    processes."""
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
        ["trace(); planted.evaluate(text)"],  # compiled from a syntax tree
        ["trace(); planted.run('x = 1\\n' + text + '\\ny = 2')"],
        ["trace(); planted.load(sys.argv[2])"],
        ["trace(); planted.run(text.replace('\\n', '\\r\\n'))"],
        ["trace(); planted.run(text.replace('x, w)}', 'x,w)}'))"],  # one space fewer
        ["trace(); planted.run('# ours\\n' + text.replace('return', '\\n\\n    return'))"],
        ["trace(); planted.run(ast.unparse(ast.parse(text)))"],
        ["trace()", "planted.run('x = 1\\n' + ast.unparse(ast.parse(text)) + '\\ny = 2')"],
        ["import py_compile; py_compile.compile(sys.argv[2]); trace()", "planted.load(sys.argv[2])"],
    ],
)
def test_a_candidate_outside_the_jail_is_heard(files: tuple[Path, Path, Path], codes: list[str]) -> None:
    found = heard(files, *codes)
    assert len(found.candidates) == 1 and found.processes == len(codes)
    assert found.violations and all("planted.py:" in v for v in found.violations)


def test_a_candidate_in_a_process_that_the_verifier_starts_is_heard(files: tuple[Path, Path, Path]) -> None:
    found = heard(files, "trace(); planted.start(text)")
    (said,) = found.violations
    assert found.processes == 2 and "planted.py:" in said and said.endswith("which started it")


def test_a_candidate_that_a_thread_runs_is_heard(files: tuple[Path, Path, Path]) -> None:
    """The thread's stack has no frame of the code that submitted the candidate, because this code runs in
    another thread. But the thread runs no other code than the candidate, and for
    this the audit reports the candidate."""
    (said,) = heard(files, "trace(); ThreadPoolExecutor(1).submit(exec, text, {}).result()").violations
    assert "a thread that does nothing else" in said


def test_another_kernel_is_no_violation(files: tuple[Path, Path, Path]) -> None:
    other = "text.replace('x, w)}', 'x, x)}')"
    found = heard(files, f"trace(); planted.run({other}); ThreadPoolExecutor(1).submit(exec, {other}, {{}})")
    assert len(found.candidates) == 1 and not found.violations


WORKING = """
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
import os, task
from coda_agent.primitives.system import workers
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ["PYTHONPATH"]])
assert workers.run_all(task.execute, [text]) == [True]
"""


def test_a_candidate_in_a_worker_of_ours_is_heard(files: tuple[Path, Path, Path]) -> None:
    """The candidate runs in one of the product's worker processes, which usually compile kernels. All of the
    project's frames on such a worker's call stack belong to ``primitives``."""
    files[0].with_name("task.py").write_text("def execute(text):\n    exec(text, {})\n    return True\n")
    found = heard(files, "trace()\n" + WORKING)
    assert len(found.candidates) == 1 and found.processes == 2
    assert found.violations and all("primitives/system/workers.py:" in v for v in found.violations)


def test_the_confined_child_may_run_an_edited_text(files: tuple[Path, Path, Path]) -> None:
    """The product forks a confined child process for an edited text, and this child may run the text. The
    child's frames belong to ``primitives``. The audit recognizes the child by its first function."""
    code = "def work():\n    planted.__name__ = 'coda_agent.primitives.planted'\n    planted.run(text)\n"
    code += "    return {'ran': 1}\n"
    code += (
        "import tempfile\nfrom pathlib import Path\nfrom coda_agent.primitives.raw import child\ntrace()\n"
    )
    code += "with tempfile.TemporaryDirectory() as scratch:\n"
    code += "    assert child.run(work, Path(scratch)) == {'ran': 1}"
    found = heard(files, code)
    assert len(found.candidates) == 1 and not found.violations


def test_a_test_that_traces_its_own_kernel_is_no_violation(files: tuple[Path, Path, Path]) -> None:
    found = heard(files, "trace(); trace_source(text, signature); exec(text, {}); planted.run('x = 1')")
    assert len(found.candidates) == 1 and not found.violations


def stands_in(text: str) -> None:
    trace_source(text, SIGNATURE)


def test_a_test_that_stands_in_for_the_jail_is_no_violation(files: tuple[Path, Path, Path]) -> None:
    ours = f"sys.path[:0] = {PYTHONPATH.split(os.pathsep)!r}; from test_audit import stands_in"
    found = heard(files, f"{ours}; trace(); planted.call(stands_in, text)")
    assert len(found.candidates) == 1 and not found.violations


def test_a_child_with_an_environment_of_its_own_is_watched(files: tuple[Path, Path, Path]) -> None:
    found = heard(files, "import subprocess; subprocess.run([sys.executable, '-c', ''], env={}, check=True)")
    assert found.processes == 2


def test_the_jails_own_child_holds_no_hook(files: tuple[Path, Path, Path]) -> None:
    """The jail's child process has no audit hook, because candidates may run there. The child runs for only
    50 ms, so loading a hook would also take too long."""
    assert heard(files, "trace()").processes == 1


def test_this_very_process_is_watched() -> None:
    directory = Path(os.environ[DIRECTORY])
    source = KERNEL.replace("any other", f"no other than {os.getpid()}")
    assert isinstance(jail.trace(source, SIGNATURE), jail.Traced)
    trace_source(source, SIGNATURE)
    log = (directory / f"{os.getpid()}.log").read_text()
    assert log.startswith("watched\n")
    assert f"candidate\t{candidate_watch.known_by(source.strip().encode())}\n" in log


SUITE = """
import sys, types
import test_audit as t
from coda_agent.primitives.frozen_names import frozen_names
def test_it():
    planted = types.ModuleType("coda_agent.verifier.planted")
    exec(t.PLANTED, planted.__dict__)
    t.jail.trace(t.KERNEL, t.SIGNATURE)
    with frozen_names():
        planted.run(%s)
"""


@pytest.mark.parametrize(
    ("text", "status", "words"), [("t.KERNEL", 1, "1 ran outside"), ("'x = 1'", 0, "nothing")]
)
def test_a_violation_fails_a_session_whose_tests_pass(
    tmp_path: Path, text: str, status: int, words: str
) -> None:
    (tmp_path / "test_planted.py").write_text(SUITE % text)
    paths = os.pathsep.join([PYTHONPATH, os.environ["PYTHONPATH"]])
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
    # without these variables, pytest starts a session of its own instead of an xdist worker
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, env=own | {"PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == status and f"{words} " in done.stdout, done.stdout
    assert "audit: 1 candidates" in done.stdout
