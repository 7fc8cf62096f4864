"""Fixtures and hooks of all tests. Caches and runs are in a temporary directory, which is removed when the
tests end. Every process is watched: if a candidate's source runs outside the jail, the test session fails."""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import importlib
import itertools
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, SUPPORT
from commanding import Command, Done

# The variables that set the cache folders of coda-agent, QuACK, Triton and PyTorch. By default, these folders
# are in the user's home or in /tmp.
CACHES = {
    "CODA_AGENT_CACHE": "coda-agent",
    "QUACK_CACHE_DIR": "quack",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
AUDIT = SUPPORT / "audit"
LONGEST = (  # test files that take more than about half a minute, longest first
    "test_sweep_on_ray",
    "test_cheats",
    "test_functional",
    "test_compile",
    "test_on_ray",
    "test_evidence",
    "test_raw_cheats",
    "test_honest",
    "test_specs",
    "test_docs",
    "test_cli_authoring",
    "test_primitive",
    "test_accept",
    "test_wheel",
    "test_audit",
    "test_sweep",
)
SESSION = pytest.StashKey[Path]()
PASSED: dict[tuple[object, ...], dict[str, Any]] = {}  # the interpret gate's figures, by spec and program


def pytest_configure(config: pytest.Config) -> None:
    """Set environment variables before xdist starts its workers. The workers inherit the variables, so all
    workers share one set of caches and one audit."""
    gc.disable()  # collect no garbage until all modules are imported
    # Inductor cannot import setuptools after distutils, so setuptools comes first
    importlib.import_module("setuptools")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        _take_one_gpu(int(worker.removeprefix("gw")))
        return
    session = config.stash[SESSION] = Path(tempfile.mkdtemp(prefix="coda-agent-tests-"))
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(session / name))
    os.environ["CODA_AGENT_RUNS"] = str(session / "runs")
    # this variable would make each of about 1,000 processes compile the project's Python files again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # xdist's workers already use all cores, so PyTorch's threads would wait for each other
    # Inductor must compile its tiny kernels in the process itself, because each process of a pool would first
    # import PyTorch.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Tests kill the head nodes of Ray clusters. By default, Ray would end this process a minute after the
    # kill.
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "3600"  # noqa: SIM112  (Ray's name)
    _watch_candidates(session / "audit")


def _take_one_gpu(worker: int) -> None:
    """Distribute xdist's workers over the machine's GPUs."""
    from coda_agent.verifier.gpu.visible import visible_gpus

    if gpus := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)].uuid
        # A process that compiles QuACK's kernels holds 0.7 GB of GPU memory. By default, each of xdist's
        # workers would start one such process per core.
        processes = 2 * (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.environ["QUACK_COMPILE_WORKERS"] = str(max(1, processes))


def _watch_candidates(directory: Path) -> None:
    """Watch for candidates in this process. A sitecustomize module watches each Python process that this
    process starts."""
    sys.path.append(str(AUDIT))
    import candidate_watch

    directory.mkdir()
    os.environ[candidate_watch.DIRECTORY] = str(directory)
    others = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(AUDIT), *others])
    candidate_watch.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first. A long file that starts last would run alone while other cores wait."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Exclude the objects of imported modules from garbage collection: there are millions of these objects,
    and they live until the process ends."""
    if "typer" in sys.modules:
        _parse_commands_once()
    gc.freeze()
    gc.enable()


def _parse_commands_once() -> None:
    """Make typer read the signatures of all commands only once. By default, typer reads all signatures
    whenever a command runs, which takes longer than most commands."""
    import typer.main
    import typer.testing

    once = functools.cache(typer.main.get_command)
    typer.main.get_command = typer.testing._get_command = once  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After a GPU test, return PyTorch's cached memory to the GPU. The other test processes on the GPU, and
    the workers of their tests, may need it."""
    if item.path.parent == ROOT / "tests" / "gpu":
        import torch

        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a candidate ran outside the jail, even if all tests passed."""
    if SESSION in session.config.stash:
        import candidate_watch

        if candidate_watch.account(session.config.stash[SESSION] / "audit").violations:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    import candidate_watch

    found = candidate_watch.account(config.stash[SESSION] / "audit")
    words = f"{len(found.candidates)} candidates, {found.processes} processes watched"
    terminalreporter.write_line(f"audit: {words}, {len(found.violations) or 'nothing'} ran outside the jail")
    for violation in found.violations:
        terminalreporter.write_line(f"audit: {violation}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    # Without unfreezing, nanobind would report the remaining objects as leaks. Unfreeze only at exit, because
    # pytest collects garbage five times before the exit.
    atexit.register(gc.unfreeze)
    if SESSION in config.stash:
        shutil.rmtree(config.stash[SESSION], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "compile all that is checked, 100 random programs, and all damaged inputs"
    parser.addoption("--thorough", action="store_true", help=words)


@pytest.fixture
def runs_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test its own folder for runs; return the folder."""
    monkeypatch.setenv("CODA_AGENT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Write a small spec; return its path."""
    from authoring import write_toy

    return write_toy(tmp_path)


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a kernel file for the small spec and returns the file's path."""

    def write(source: str) -> Path:
        path = tmp_path / "toy.py"
        path.write_text(source)
        return path

    return write


@pytest.fixture(scope="module")
def fresh_workers() -> None:
    """End the workers that the tests of earlier files started. A worker keeps the cache and the import path
    that were set when it started."""
    from coda_agent.primitives.system import workers

    for worker in workers._pool(os.getpid()).workers:
        worker.end()


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run references in this process, so that a test can replace what they call. Tests with the mark
    ``apart`` run them in a child."""
    from coda_agent.verifier import apart

    if not request.node.get_closest_marker("apart"):
        monkeypatch.setattr(apart, "run", lambda task, argument: task(argument))


@pytest.fixture
def some_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each check a third of the interpreter's runs. The name of the test determines which third, so the
    tests of many kernels together use all runs. With --thorough, each check gets all runs."""
    from coda_agent.verifier.numerics import cpu_numerics

    if not request.config.getoption("thorough"):
        turn, every = _turn(request), cpu_numerics.runs
        monkeypatch.setattr(cpu_numerics, "runs", lambda *given: [*every(*given)][turn % 3 :: 3])


@pytest.fixture
def some_compiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checks of about one test in six compile, on one of two schedules. The name of the test
    determines whether its checks compile, and on which schedule. With --thorough, every check compiles on all
    schedules."""
    from coda_agent.primitives.compiler.probe_schedules import PROBES

    if request.config.getoption("thorough"):
        return
    turn = _turn(request) // 3
    if turn % 6:
        request.getfixturevalue("told_resources")
    else:
        monkeypatch.setattr("coda_agent.verifier.verify.PROBES", (PROBES[turn // 6 % len(PROBES)],))


def _turn(request: pytest.FixtureRequest) -> int:
    return zlib.crc32(request.node.name.encode())


@pytest.fixture
def told_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the compile gate report the same resources for every program, without compiling."""
    from authoring import resources

    import coda_agent.primitives.runtime.compile

    report: Callable[..., object] = resources
    monkeypatch.setattr(coda_agent.primitives.runtime.compile, "report", report)


@pytest.fixture
def interpreted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a program passed in an earlier test of this process, reuse its figures instead of interpreting the
    program again."""
    from coda_agent.primitives.system import deadline
    from coda_agent.verifier import verify
    from coda_agent.verifier.numerics import cpu_numerics

    real = verify._interpret

    def interpret(spec: Any, program: Any, figures: dict[str, Any], lines: Sequence[int | None] = ()) -> None:
        deadline.check()
        what = repr(spec), program.to_json(), cpu_numerics.runs
        if what not in PASSED:
            real(spec, program, figures, lines)
            PASSED[what] = copy.deepcopy(figures)
        figures |= copy.deepcopy(PASSED[what])

    monkeypatch.setattr(verify, "_interpret", interpret)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, told_resources: None, interpreted_once: None) -> None:
    """Run no compiler. The gates before the compile gate are real, but every test draws the same inputs. A
    program that passed in an earlier test is not interpreted again."""
    seeds = itertools.count(1)
    monkeypatch.setattr("coda_agent.verifier.verify.secrets.randbits", lambda bits: next(seeds))


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that configure this machine's requests to Claude: key, address, model and
    proxies."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "CODA_AGENT_MODEL", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the API key, hide the GPU, and set a terminal width of 220 columns, so that no output line is
    broken."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs ``coda-agent`` with given arguments, in this process."""
    from coda_agent.agent.cli import main

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["coda-agent", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Any:
    """Return where a test of ``fused`` runs: on the GPU if pytest collected the test from a file in
    tests/gpu, otherwise on the CPU."""
    import layer_parts

    return layer_parts.GPU if request.path.parent == ROOT / "tests" / "gpu" else layer_parts.CPU


@pytest.fixture
def nothing_beside() -> Iterator[None]:
    """Check that the test creates nothing in the checkout's root, except caches and coverage data."""
    before = set(os.listdir(ROOT))
    yield
    assert set(os.listdir(ROOT)) - before <= {".cache", ".coverage", "__pycache__"}
