"""Tests of the jail with many hostile sources, and on systems that lack some of the jail's layers. Further
tests have compilers that hang, crash, or write too much output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from cheats import hostile
from cheats.child import TAKEN_OVER, nothing_left
from cheats.twins import RMSNORM
from waiting import eventually

from coda_agent.primitives.compiler.compile_error import CompileError
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.runtime.compile import report
from coda_agent.primitives.system import subprocesses
from coda_agent.verifier.report import Checked, Rejected
from coda_agent.verifier.sandbox import jail
from coda_agent.verifier.sandbox.jail import JailUnavailable, Traced
from coda_agent.verifier.verify import check

pytestmark = pytest.mark.slow

# Many hostile sources

RUNS = int(os.environ.get("CODA_AGENT_JAIL_RUNS", "100"))  # 1000 sources take a minute
LEAK = 1024  # bytes by which memory may grow per run


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hostile_sources_in_a_row_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = hostile.sources(seed=20261122)

    def run(count: int) -> None:
        for one in islice(made, count):
            monkeypatch.setattr(jail, "BOOT", TAKEN_OVER if one.taken_over else honest_boot)
            ended.add(type(jail.trace(one.source, RMSNORM.spec.signature())))

    honest_boot, ended = jail.BOOT, set[type]()
    run(60)  # fill the caches
    with nothing_left(tmp_path, monkeypatch):
        before = resident_bytes()
        run(RUNS)
        assert resident_bytes() - before < RUNS * LEAK
    assert ended == {Traced, Rejected}  # a source is traced if its attack has no effect


def test_no_hostile_source_is_another() -> None:
    made = list(islice(hostile.sources(seed=1), 1000))
    assert made == list(islice(hostile.sources(seed=1), 1000))
    assert len({one.source for one in made}) == 1000
    # Sources also differ in more than names, numbers and comments.
    shapes = {re.sub(r"#.*|\b[a-z]{6,12}\b|[-\d.]+|\s", "", one.source) for one in made}
    assert len(shapes) > 800
    wrappings = {one.wrapping for one in made}
    assert wrappings == {*hostile.WRAPPINGS, "nothing"}
    assert 300 < sum(one.taken_over for one in made) < 500


# Systems that lack layers

DARWIN = """
import sys; sys.platform = "darwin"; import resource; limit = resource.setrlimit
def without_addresses(kind, limits):
    if kind == resource.RLIMIT_AS: raise ValueError("current limit exceeds maximum limit")
    limit(kind, limits)
resource.setrlimit = without_addresses
"""
LINUX_ONLY = ("parent_death", "undumpable", "no_new_privileges", "limits", "landlock", "seccomp")


LACKING = """
import sys; sys.path.append(sys.argv[1])
from coda_agent.primitives.system import sandbox
from coda_agent.verifier.sandbox import jail_child
def refuse(): raise OSError("not here")
sandbox.LAYERS = tuple((n, refuse if n in %r else f) for n, f in sandbox.LAYERS)
jail_child.main()
"""


def test_macos_starts_and_refuses_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "BOOT", DARWIN + jail.BOOT)
    signature = RMSNORM.spec.signature()
    with pytest.raises(JailUnavailable, match="neither seccomp nor Landlock.*Linux.*--weak-jail"):
        jail.trace(RMSNORM.source, signature)
    traced = jail.trace(RMSNORM.source, signature, weak=True)
    assert isinstance(traced, Traced) and traced.program == RMSNORM.program
    assert traced.layers == () and traced.missing == LINUX_ONLY


def test_a_limit_that_a_system_lacks_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    look = "resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_FSIZE)"
    monkeypatch.setattr(jail, "BOOT", DARWIN + TAKEN_OVER)
    result = jail.trace(f"import resource\nsaid = {look}", RMSNORM.spec.signature(), weak=True)
    assert isinstance(result, Rejected) and result.message == "((8, 8), (0, 0))"


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("missing", [(), ("seccomp",), ("landlock", "seccomp")])
def test_what_is_missing_is_in_the_report(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    monkeypatch.setattr(jail, "BOOT", LACKING % (missing,))
    monkeypatch.setattr("coda_agent.verifier.verify._interpret", lambda *given: None)  # would take seconds
    report = check(RMSNORM.spec, RMSNORM.source, weak_jail=True).report
    assert isinstance(report, Checked)
    words = f"the jail lacks {', '.join(missing)} on this machine"
    assert report.gates[0].findings == ((words,) if missing else ())
    assert report.gates[0].figures["layers"] == [layer for layer in LINUX_ONLY if layer not in missing]
    refused = check(RMSNORM.spec, "import os\n", weak_jail=True).report
    assert isinstance(refused, Rejected)
    assert refused.evidence == ({"missing_layers": missing} if missing else {})


# Compilers that run wild


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that replaces the compiler by a script. The function returns the file to which the
    script writes the ids of its processes."""
    script, pids = tmp_path / "python", tmp_path / "pids"
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))

    def play(body: str) -> Path:
        start = "import os, sys, time\nforked = os.fork()\nif forked == 0: time.sleep(600)\n"
        note = f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{forked}}')\n"
        script.write_text(f"#!{sys.base_prefix}/bin/python3\n{start}{note}{body}\n")
        script.chmod(0o755)
        return pids

    return play


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("time.sleep(600)", "did not finish in 1 s"),
        ("x = bytearray(1 << 30)", "exceeded 0.25 GB of memory: .*MemoryError"),
        ("os.abort()", "died with status -6"),  # while a child keeps the output pipe open
        ("sys.stderr.write('x' * (1 << 22) + 'the reason'); sys.exit(3)", "x the reason|xthe reason"),
    ],
    ids=["hangs", "allocates", "crashes", "floods"],
)
def test_a_compiler_is_ended_with_all_it_started(
    compiler: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    monkeypatch.setattr("coda_agent.primitives.runtime.compile.COMPILE_SECONDS", 1 if "sleep" in body else 60)
    monkeypatch.setattr(subprocesses, "MEMORY_BYTES", 256 << 20)
    pids = compiler(body)
    with pytest.raises(CompileError, match=f"(?s){words}") as caught:
        report(KernelSource(RMSNORM.program), {})
    assert len(str(caught.value)) < 1600
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2 and eventually(lambda: not any(map(alive, started)))


COMPILE = "import sys\nfrom coda_agent.primitives.runtime.compile import report\n"
COMPILE += "from coda_agent.primitives.compiler.kernel_source import KernelSource\n"
COMPILE += "from coda_agent.primitives.lang.ir import Program\n"
COMPILE += "report(KernelSource(Program.from_json(sys.stdin.read())), {})"


# A replacement for QuACK, which only the compiler's process imports. The import records the id of this
# process and never ends.
ENDLESS = """
import os, time
open("{note}.draft", "w").write(str(os.getpid()))
os.rename("{note}.draft", "{note}")
time.sleep(600)
"""


def test_a_compiler_dies_with_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "note"
    (tmp_path / "quack.py").write_text(ENDLESS.format(note=note))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | dict.fromkeys(("CODA_AGENT_CACHE", "TMPDIR"), str(tmp_path))
    command = [sys.executable, "-c", COMPILE]
    with subprocess.Popen(command, env=environment | {"PYTHONPATH": path}, stdin=subprocess.PIPE) as parent:
        try:
            assert parent.stdin is not None
            parent.stdin.write(RMSNORM.program.to_json().encode())
            parent.stdin.close()
            assert eventually(lambda: note.exists() or parent.poll() is not None, 240)
            child = int(note.read_text())
            assert child != parent.pid and alive(child)
        finally:
            parent.kill()
    assert eventually(lambda: not alive(child), 60)


def test_a_child_whose_parent_died_before_it_began_runs_nothing() -> None:
    """A parent that dies so early sends the child no signal. Instead, the child must find that it has another
    parent, and exit."""
    command = [sys.executable, "-I", "-S", subprocesses.__file__, "0", "/bin/echo", "ran"]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")
