"""What every test stands on: caches and runs in a directory of this session's own, gone afterwards, and an
ear in every process that hears whether a candidate's source runs outside the jail."""

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

# The caches of ours, QuACK, Triton and PyTorch: each would otherwise be in the user's home or in /tmp.
CACHES = {
    "CODA_AGENT_CACHE": "coda-agent",
    "QUACK_CACHE_DIR": "quack",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
AUDIT = SUPPORT / "audit"
LONGEST = (  # files of more than about half a minute, the longest first
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
    """Before xdist starts its workers, which inherit the environment and so share one cache and one audit."""
    gc.disable()  # until all modules are imported
    importlib.import_module("setuptools")  # first, since Inductor cannot import it after distutils
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    session = config.stash[SESSION] = Path(tempfile.mkdtemp(prefix="coda-agent-tests-"))
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(session / name))
    os.environ["CODA_AGENT_RUNS"] = str(session / "runs")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of a thousand processes would compile the project
    sys.dont_write_bytecode = False
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # workers side by side: PyTorch's threads would wait in turn
    # in the process itself: a pool would import PyTorch first, for kernels of a few lines
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Tests kill the heads of clusters. Ray would end this process a minute later.
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "3600"  # noqa: SIM112  (Ray's name)
    _watch_candidates(session / "audit")


def _watch_candidates(directory: Path) -> None:
    """In this process, and by a sitecustomize in every Python that it starts."""
    sys.path.append(str(AUDIT))
    import candidate_watch

    directory.mkdir()
    os.environ[candidate_watch.DIRECTORY] = str(directory)
    others = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(AUDIT), *others])
    candidate_watch.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first: one that began last would end alone, while other cores wait."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """All modules are imported, and stay: no garbage collection looks at their millions of objects."""
    if "typer" in sys.modules:
        _parse_commands_once()
    gc.freeze()
    gc.enable()


def _parse_commands_once() -> None:
    """Typer reads the signatures of all commands at each call, which takes longer than most commands."""
    import typer.main
    import typer.testing

    once = functools.cache(typer.main.get_command)
    typer.main.get_command = typer.testing._get_command = once  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A candidate that ran outside the jail fails the session, whatever the tests say."""
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
    # Else nanobind takes what is left for leaks. At the end: pytest collects garbage five times before.
    atexit.register(gc.unfreeze)
    if SESSION in config.stash:
        shutil.rmtree(config.stash[SESSION], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "compile all that is checked, 100 random programs, and all damaged inputs"
    parser.addoption("--thorough", action="store_true", help=words)


@pytest.fixture
def runs_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for runs that is this test's own."""
    monkeypatch.setenv("CODA_AGENT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The file of a small spec."""
    from authoring import write_toy

    return write_toy(tmp_path)


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the file of a kernel for it."""

    def write(source: str) -> Path:
        path = tmp_path / "toy.py"
        path.write_text(source)
        return path

    return write


@pytest.fixture(scope="module")
def fresh_workers() -> None:
    """End the workers that earlier files' tests started: a worker keeps the environment, and so the cache and
    the import path, of its start."""
    from coda_agent.primitives.system import workers

    for worker in workers._workers:
        worker.end()


@pytest.fixture
def some_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check has a third of the interpreter's runs, by the test's name; with --thorough all. A corpus of
    kernels meets runs of every kind."""
    from coda_agent.verifier.numerics import cpu_numerics

    if not request.config.getoption("thorough"):
        turn, every = _turn(request), cpu_numerics.runs
        monkeypatch.setattr(cpu_numerics, "runs", lambda *given: [*every(*given)][turn % 3 :: 3])


@pytest.fixture
def some_compiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One check in six compiles, on one of two schedules, by the test's name; with --thorough all do."""
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
    """The compile gate's compiler gives the same account of every program, at once."""
    from authoring import resources

    import coda_agent.primitives.runtime.compile

    report: Callable[..., object] = resources
    monkeypatch.setattr(coda_agent.primitives.runtime.compile, "report", report)


@pytest.fixture
def interpreted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's verdict on a program that passed stands for later tests of the process."""
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
    """No compiler runs. The gates before it are real, but on the same inputs each time."""
    seeds = itertools.count(1)
    monkeypatch.setattr("coda_agent.verifier.verify.secrets.randbits", lambda bits: next(seeds))


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's says where and how Claude is asked."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "CODA_AGENT_MODEL", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no GPU, and lines long enough that words are not broken."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``agent.cli.main.main`` in this process."""
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
    """Where a test of fused runs: on a GPU if a module of tests/gpu collected it."""
    import layer_parts

    return layer_parts.GPU if request.path.parent == ROOT / "tests" / "gpu" else layer_parts.CPU


@pytest.fixture
def nothing_beside() -> Iterator[None]:
    """No command of these tests writes into the checkout."""
    before = set(os.listdir(ROOT))
    yield
    assert set(os.listdir(ROOT)) - before <= {".cache", ".coverage", "__pycache__"}
