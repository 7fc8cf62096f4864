"""The jail returns the programs of honest kernels and nothing else, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cheats.child import BARE, nothing_left
from checkout import PYTHONPATH
from waiting import eventually

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.kernel_file import trace_lines, trace_source
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.verifier.report import Rejected
from coda_agent.verifier.sandbox import jail
from coda_agent.verifier.sandbox.jail import JailUnavailable, Traced


def tensor(dtype: str, *shape: str) -> TensorType:
    return TensorType(tuple(Dim.parse(d) for d in shape), dtype)


SIGNATURE = Signature(
    "gemm_residual_partial_rmsnorm",
    ("M", "K", "N"),
    {
        "y": tensor("bf16", "M", "K"),
        "w": tensor("bf16", "K", "N"),
        "x": tensor("bf16", "M", "N"),
        "gamma": tensor("bf16", "N"),
    },
    {"h": tensor("bf16", "M", "N"), "hg": tensor("bf16", "M", "N"), "rstd": tensor("fp32", "M")},
    {"eps": 1e-6},
)
HONEST = '''"""Unicode in text is fine: \u03b3, \u5c0f."""
from primitives import gemm, kernel, per_column, row_sums, rsqrt

@kernel
def gemm_residual_partial_rmsnorm(y, w, x, gamma, eps):
    """h = y w + x; its RMSNorm's row scale is left to the next GEMM."""
    h = gemm(y, w) + x
    rstd = rsqrt(row_sums(h * h) / h.columns + eps)
    return {"h": h, "hg": h * per_column(gamma), "rstd": rstd}
'''


Bare = Callable[..., Traced | Rejected]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Bare:
    def run(source: str, *, lacking: tuple[str, ...] = (), **options: float | bool) -> Traced | Rejected:
        monkeypatch.setattr(jail, "BOOT", f"{BARE}\nwithout(*{lacking!r})\njail_child.main()")
        return jail.trace(source, SIGNATURE, **options)  # type: ignore[arg-type]

    return run


def said(result: Traced | Rejected) -> dict[str, object]:
    assert isinstance(result, Rejected) and result.code == "said", result
    answer = json.loads(result.message)
    assert isinstance(answer, dict)
    return answer


def rejected(result: Traced | Rejected) -> Rejected:
    assert isinstance(result, Rejected), result
    assert result.gate == "trace"
    return result


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that a test leaves no process, descriptor or file behind. Some thirty of the tests below attack
    the jail."""
    with nothing_left(tmp_path, monkeypatch):
        yield


# Honest kernels


def test_an_honest_kernel_gives_the_program_that_tracing_it_here_gives() -> None:
    results = [jail.trace(HONEST, SIGNATURE) for _ in range(8)]
    here, lines = trace_lines(HONEST, SIGNATURE)
    seconds = []
    for result in results:
        assert isinstance(result, Traced), result
        assert result.program == here and result.program.hash == here.hash
        assert list(result.lines) == lines
        assert not result.missing
        seconds.append(result.seconds)
    print(f"jailed trace: median {sorted(seconds)[4] * 1e3:.0f} ms, best {min(seconds) * 1e3:.0f} ms")


@pytest.mark.parametrize("source", ["\ufeff" + HONEST, HONEST.replace("\n", "\r\n")], ids=["mark", "crlf"])
def test_a_byte_order_mark_and_other_line_ends_change_nothing(source: str) -> None:
    result = jail.trace(source, SIGNATURE)
    assert isinstance(result, Traced)
    assert result.program == trace_source(HONEST, SIGNATURE)


def test_every_layer_is_in_force_and_named() -> None:
    result = jail.trace(HONEST, SIGNATURE)
    assert isinstance(result, Traced)
    assert result.layers == (
        "parent_death", "undumpable", "no_new_privileges", "limits", "landlock", "seccomp",
    )  # fmt: skip


def test_an_author_reads_the_tracers_own_error_with_its_line() -> None:
    result = rejected(jail.trace(HONEST.replace("h * per_column(gamma)", "h * gamma"), SIGNATURE))
    assert result.code == "broadcast" and result.line == 9
    assert "per_column" in result.message


# The operating system's refusals, without help from the language check

PROBE = """
import ctypes, errno, json, mmap, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def c(function, *arguments):
    if getattr(libc, function)(*arguments) in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), function)
def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
attempts = {
    "fork": fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "open": lambda: open("/etc/passwd"),
    "create": lambda: open("/tmp/jail-was-here", "w"),
    "stat": lambda: os.stat("/etc/passwd"),
    "list": lambda: os.listdir("/"),
    "mkdir": lambda: os.mkdir("/tmp/jail-was-here"),
    "unlink": lambda: os.unlink("/etc/jail-not-there"),
    "memfd": lambda: os.memfd_create("x"),
    "socket": lambda: socket.socket(),
    "unix": lambda: socket.socketpair(),
    "kill": lambda: os.kill(os.getppid() if os.getppid() > 0 else 1, 0),
    "ptrace": lambda: c("ptrace", 16, 1, 0, 0),
    "clone3": lambda: c("syscall", 435, 0, 0),
    "unshare": lambda: c("unshare", 0x10000000),
    "setuid": lambda: os.setuid(65534),
    "io_uring": lambda: c("syscall", 425, 1, 0),
    "bpf": lambda: c("syscall", 321, 0, 0, 0),
    "code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "protect": lambda: c("mprotect", ctypes.c_void_p(id(libc) & ~4095), 4096, 5),
    "limits": lambda: resource.setrlimit(resource.RLIMIT_CPU, (100, 100)),
    "x32": lambda: c("syscall", 0x40000000 + 39),
}
said = {}
for name, attempt in attempts.items():
    try:
        attempt()
        said[name] = "allowed"
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
    except ValueError as error:
        said[name] = "EPERM" if "not allowed" in str(error) else str(error)
said = json.dumps(said)
"""


def test_seccomp_refuses_all_but_computing(bare: Bare) -> None:
    answer = said(bare(PROBE))
    assert len(answer) == 22
    assert {name: code for name, code in answer.items() if code != "EPERM"} == {}
    assert said(bare(PROBE, lacking=("landlock",))) == answer  # seccomp alone suffices


def test_landlock_alone_keeps_files_and_the_network(bare: Bare) -> None:
    source = """
import errno, json, os, signal, socket
said = {}
for name, attempt in {
    "open": lambda: open("/etc/passwd"), "create": lambda: open("/tmp/jail-was-here", "w"),
    "list": lambda: os.listdir("/"), "mkdir": lambda: os.mkdir("/tmp/jail-was-here"),
    "exec": lambda: os.execv("/bin/true", ["true"]), "kill": lambda: os.kill(os.getppid(), 0),
    "connect": lambda: socket.socket().connect(("127.0.0.1", 9)),
}.items():
    try:
        attempt()
        said[name] = "allowed"
    except OSError as error:
        said[name] = errno.errorcode[error.errno]
said = json.dumps(said)
"""
    answer = said(bare(source, lacking=("seccomp",)))
    assert set(answer.values()) <= {"EACCES", "EPERM"} and len(answer) == 7, answer


def test_limits_and_process_flags(bare: Bare) -> None:
    source = """
import ctypes, json, os, resource, signal
libc = ctypes.CDLL(None)
death = ctypes.c_int()
libc.prctl(2, ctypes.byref(death), 0, 0, 0)
said = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in
        ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE")}
said |= {"death": death.value, "dumpable": libc.prctl(3, 0, 0, 0, 0), "no_new": libc.prctl(39, 0, 0, 0, 0),
         "session": os.getsid(0) == os.getpid(), "environment": dict(os.environ), "cwd": os.getcwd(),
         "open": [fd for fd in range(16) if not libc.fcntl(fd, 1) < 0]}
said = json.dumps(said)
"""
    answer = said(bare(source, lacking=("seccomp", "landlock"), weak=True))
    environment = answer.pop("environment")
    assert isinstance(environment, dict) and set(environment) <= {"LC_CTYPE"}  # Python itself sets LC_CTYPE
    assert answer == {
        "AS": [768 << 20] * 2, "CPU": [3, 4], "FSIZE": [0, 0], "NOFILE": [8, 8], "NPROC": [0, 0],
        "CORE": [0, 0], "death": signal.SIGKILL, "dumpable": 0, "no_new": 1, "session": True,
        "cwd": "/", "open": [0, 1, 2, 3],
    }  # fmt: skip


def test_what_a_system_lacks_is_named_and_too_little_is_refused(bare: Bare) -> None:
    both = ("seccomp", "landlock")
    with pytest.raises(JailUnavailable, match="neither seccomp nor Landlock"):
        bare("answer = 1 / 0", lacking=both)
    program, lines = trace_lines(HONEST, SIGNATURE)
    weak = f"answer = {{'program': {program.to_json()!r}, 'lines': {lines}}}"
    result = bare(weak, lacking=both, weak=True)
    assert isinstance(result, Traced) and set(result.missing) == set(both)
    result = bare(weak, lacking=("seccomp",))
    assert isinstance(result, Traced) and result.missing == ("seccomp",) and "landlock" in result.layers


def test_a_jail_that_does_not_start_is_our_error_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "BOOT", "raise SystemExit('the house is on fire')")
    with pytest.raises(JailUnavailable, match="exit status 1.*the house is on fire"):
        jail.trace(HONEST, SIGNATURE)
    monkeypatch.setattr(jail, "BOOT", "import time; time.sleep(9)")
    with pytest.raises(JailUnavailable, match="too slow to start"):
        jail.trace(HONEST, SIGNATURE, wall_seconds=0.2)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(JailUnavailable, match="/no/such/python"):
        jail.trace(HONEST, SIGNATURE)


# Answers from a child that has been taken over


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import os\nos.write(1, b'{}\\n')\nos.write(2, b'{}\\n')", "said", "None"),
        ("import os\nos.write(3, b'{\"program\": 1}\\n')", "forged", ""),
        ("import os\nos.write(3, b'{\"error\": ' + b'[' * 500000)\nos._exit(0)", "crashed", "exit status 0"),
        ("import os\nos.write(3, b'[' * 500000 + b'\\n')\nos._exit(0)", "forged", ""),
        ("import os\nos.write(3, b'\\xff\\xfe\\n')\nos._exit(0)", "forged", ""),
        ("import os\nos._exit(0)", "crashed", "exit status 0"),
        ("import os\nos._exit(7)", "crashed", "exit status 7"),
        ("import ctypes\nctypes.string_at(1)", "crashed", "SIGSEGV"),
        ("raise SystemError('at sea')", "crashed", "at sea"),
        ("import os\nwhile 1: os.write(3, b' ' * 65536)", "too_large", "1048576"),
        ("answer = {'program': ' ' * (2 << 20)}", "too_large", "1048576"),
        ("answer = {'program': '{}', 'lines': []}", "json", "exactly"),
        ("answer = {'program': '[' * 99999, 'lines': []}", "json", "JSON"),
        ("answer = {'program': 7, 'lines': []}", "forged", ""),
        ("answer = {'program': '{}'}", "forged", ""),
        ("answer = {'program': '{}', 'lines': [], 'layers': []}", "forged", ""),
        ("answer = [1]", "forged", ""),
        ("answer = {'error': {'code': 'ACCEPTED!', 'message': '', 'line': None}}", "forged", ""),
        ("answer = {'error': {'code': 'x', 'message': '', 'line': 10**30}}", "forged", ""),
        ("answer = {'error': {'code': 'x', 'message': '\\x1b[2Jgone\\u202e', 'line': 1}}", "x", "?[2Jgone?"),
        ("answer = {'accepted': True}", "forged", ""),
        ("import time\nimport sys\nwhile 1: pass", "timeout", "1.5 s"),
        ("x = bytearray(10 << 30)", "crashed", "MemoryError"),
    ],
)
def test_a_child_taken_over_is_rejected(bare: Bare, source: str, code: str, words: str) -> None:
    result = rejected(bare(source, wall_seconds=1.5 if code == "timeout" else 5.0))
    assert result.code == code, result
    assert words in result.message


def test_a_program_for_another_signature_is_rejected(bare: Bare) -> None:
    text = trace_source(HONEST, SIGNATURE).to_json().replace('"fp32"', '"bf16"')
    assert rejected(bare(f"answer = {{'program': {text!r}, 'lines': []}}")).code == "signature"


@pytest.mark.parametrize("lines", ["[1]", "[True] * n", "[0] * n", "[1 << 40] * n", "['1'] * n", "None"])
def test_lines_that_no_kernel_file_has_are_forged(bare: Bare, lines: str) -> None:
    program, known = trace_lines(HONEST, SIGNATURE)
    told = f"n = {len(known)}\nanswer = {{'program': {program.to_json()!r}, 'lines': {lines}}}"
    assert rejected(bare(told)).code == "forged"


def test_cpu_time_is_limited_where_wall_time_is_not(bare: Bare) -> None:
    result = rejected(bare("while 1: pass", wall_seconds=60.0))
    assert result.code == "timeout" and "3 s of CPU" in result.message


def test_the_whole_group_dies_with_the_child(bare: Bare) -> None:
    """Without seccomp, a jailed child that runs as root can fork. When the child ends, all processes
    of its process group are killed."""
    source = """
import os, time
try:
    said = os.fork()
except OSError:
    said = 0  # the limit on processes binds all but root
else:
    if said == 0:
        os.closerange(0, 16)
        time.sleep(30)
"""
    result = rejected(bare(source, lacking=("seccomp",)))
    assert result.code == "said"
    if int(result.message):
        assert eventually(lambda: not alive(int(result.message)), 1.0)


def test_the_child_dies_with_its_parent() -> None:
    slow = "import sys; sys.path[:0] = sys.argv[1:]\nimport test_jail as t\n"
    slow += "from coda_agent.verifier.sandbox import jail\njail.BOOT = t.BARE + 'jail_child.main()'\n"
    slow += "jail.trace('while 1: pass', t.SIGNATURE, wall_seconds=60)"
    with subprocess.Popen(
        [sys.executable, "-c", slow, *PYTHONPATH.split(os.pathsep), str(Path(__file__).parent)]
    ) as parent:
        try:
            jailed = _jailed_child(parent.pid)
            assert alive(jailed)
        finally:
            parent.kill()
    assert eventually(lambda: not alive(jailed), 1.0)  # the limit on CPU time would kill it after 3 s


def _jailed_child(parent: int) -> int:
    """Wait for a child of ``parent`` whose seccomp filter is in force; return the child's process id."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                text = status.read_text()
            except OSError:
                continue  # the process has ended
            if f"\nPPid:\t{parent}\n" in text and "\nSeccomp:\t2\n" in text:
                return int(status.parent.name)
        time.sleep(0.01)
    raise AssertionError("no jailed child came up")
