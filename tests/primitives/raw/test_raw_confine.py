"""In the confined process that compiles a raw module, real compiles work and nothing else does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from coda_agent.primitives.raw.confine import CALLS, LIMITS, environment

pytestmark = pytest.mark.slow

KERNELS = ROOT / "generated_kernels"

# The program of a parent process. Each piece of work is a string of Python lines with a name. If one piece is
# called "build", the parent first compiles a kernel, so that it has the compiler's threads and engine. Then
# the parent forks a confined child for each piece. Finally it prints the children's answers, by name.
PARENT = """
import json, os, sys, threading, time, traceback, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from coda_agent.primitives.compiler import jit
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.raw.confine import confine
import torch

def lowered(name):
    return lower(Program.from_json((Path(sys.argv[1]) / f"{name}.program.json").read_text()))

def build(made):
    sizes = {}
    for kernel in made.gemms:
        found = jit.compile_kernel(made, kernel, PROBES[0], sizes)
        found.export_to_c(object_file_path=f"{kernel.name}.o", function_name="func")
    for kernel in made.vectors:
        found = jit.compile_kernel(made, kernel, None, sizes)
        found.export_to_c(object_file_path=f"{kernel.name}.o", function_name="func")

def child(work, answer, hold):
    start = time.monotonic()
    layers, missing = confine(parent, scratch, keep=(answer,))
    seconds = time.monotonic() - start
    said = {"layers": layers, "missing": missing, "seconds": seconds}
    try:
        names = {"lowered": lowered, "build": build, "jit": jit, "made": made, "hold": hold}
        exec(work, names)
        said["said"] = names.get("said")
    except BaseException:
        said["failed"] = traceback.format_exc()
    os.write(answer, json.dumps(said).encode())
    os._exit(0)

parent, scratch = os.getpid(), Path(sys.argv[2])
made = lowered("gemm_row_abs_max")
if "build" in sys.argv[3]:
    jit.load_module(made)
    build(made)
idle = threading.Thread(target=time.sleep, args=(60,), daemon=True)
idle.start()
answers = {}
for name, work in json.loads(sys.argv[3]).items():
    reading, answer = os.pipe()
    hold = os.open("/etc/passwd", os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        child(work, answer, hold)
    os.close(answer)
    said = b""
    while chunk := os.read(reading, 65536):
        said += chunk
    session = os.getsid(pid) == pid  # a zombie has one
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    answers[name] = {"status": status, "session": session, **(json.loads(said) if said else {})}
print(json.dumps(answers))
"""

BUILD = """
from pathlib import Path
text = Path("module.py")
text.write_text(made.text)
jit.import_file(made.module, text.resolve())
build(made)
said = sorted(p.name.partition("_")[0] for p in Path.cwd().glob("*.o"))
"""

ATTEMPTS = r"""
import ctypes, errno, mmap, os, resource, signal, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if getattr(libc, function)(*arguments) in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), function)
def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
def clone(flags):
    if libc.syscall(56 if os.uname().machine == "x86_64" else 220, flags, 0, 0, 0, 0) == 0:
        os._exit(0)
    raise OSError(ctypes.get_errno(), "clone")
TGKILL = 234 if os.uname().machine == "x86_64" else 131
attempts = {
    "passwd": lambda: open("/etc/passwd"),
    "home": lambda: os.listdir(PLACES["home"]),
    "project": lambda: open(PLACES["project"]),
    "list the root": lambda: os.listdir("/"),
    "own environment": lambda: open("/proc/self/environ"),
    "own memory": lambda: open("/proc/self/mem"),
    "its parent": lambda: open(f"/proc/{os.getppid()}/environ"),
    "write beside": lambda: open(PLACES["beside"], "w"),
    "write a package": lambda: open(os.__file__, "a"),
    "write /tmp": lambda: open("/tmp/raw-was-here", "w"),
    "write /dev/shm": lambda: open("/dev/shm/raw-was-here", "w"),
    "rename out": lambda: (open("own", "w").close(), os.rename("own", PLACES["beside"])),
    "link": lambda: os.symlink("/etc/passwd", "link"),
    "hard link": lambda: os.link("own", "linked"),
    "chmod": lambda: os.chmod("own", 0o777),
    "truncate": lambda: os.truncate(os.__file__, 0),
    "device": lambda: os.open("/dev/nvidia0", os.O_RDWR),
    "control device": lambda: os.open("/dev/nvidiactl", os.O_RDWR),
    "null device": lambda: os.open("/dev/null", os.O_RDWR),
    "inherited": lambda: os.read(hold, 1),
    "input": lambda: os.read(0, 1) and 1 / 0 or (_ for _ in ()).throw(OSError(errno.EPERM, "empty")),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "spawn": lambda: subprocess.run(["/bin/true"]),
    "fork": fork,
    "vfork": lambda: call("syscall", 58),
    "clone a process": lambda: clone(signal.SIGCHLD),
    "clone a namespace": lambda: clone(0x10000 | 0x40000000),
    "unshare": lambda: call("unshare", 0x10000000),
    "tcp": lambda: socket.socket(),
    "unix": lambda: socket.socketpair(),
    "kill its parent": lambda: os.kill(os.getppid(), 0),
    "signal a thread": lambda: call("syscall", TGKILL, os.getppid(), os.getppid(), 0),
    "ptrace": lambda: call("ptrace", 16, os.getppid(), 0, 0),
    "read another": lambda: call("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0),
    "pidfd": lambda: os.pidfd_open(os.getppid()),
    "mount": lambda: call("mount", b"x", b"/", b"x", 0, 0),
    "bpf": lambda: call("syscall", 321, 0, 0, 0),
    "io_uring": lambda: call("syscall", 425, 1, 0),
    "perf": lambda: call("syscall", 298, 0, 0, 0, 0, 0),
    "keyctl": lambda: call("syscall", 250, 0, 0, 0),
    "memfd": lambda: os.memfd_create("x"),
    "limits of another": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "raise limits": lambda: resource.setrlimit(resource.RLIMIT_CPU, (10000, 10000)),
    "tiocsti": lambda: call("ioctl", 2, 0x5412, b"x"),
    "dumpable": lambda: call("prctl", 4, 1, 0, 0, 0),
    "own signals": lambda: call("fcntl", 2, 8, os.getppid()),
    "setuid": lambda: os.setuid(65534),
    "x32": lambda: call("syscall", 0x40000000 + 39),
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
"""

HONEST = """
import os, resource, sys, tempfile, threading
from pathlib import Path
done = []
threads = [threading.Thread(target=done.append, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.TemporaryFile() as file:
    file.write(b"x")
Path("folder").mkdir()
Path("folder/a").write_text("text")
Path("folder/a").rename("folder/b")
Path("folder/b").unlink()
Path("folder").rmdir()
try:
    Path("long").write_bytes(bytes(65 << 20))
    long = "allowed"
except OSError as error:
    long = str(error)
Path("long").unlink()
import xml.dom.minidom  # of the standard library, and not imported before
said = {
    "threads": sorted(done), "environment": sorted(os.environ),
    "cwd": os.getcwd(), "home": os.environ["HOME"], "long": long,
    "open": sorted(fd for fd in range(64) if _open(fd)),
    "CPU": resource.getrlimit(resource.RLIMIT_CPU)[0], "CORE": resource.getrlimit(resource.RLIMIT_CORE),
}
"""
ABORT = "import ctypes; ctypes.CDLL(None).abort()"
OPEN = """
import os
def _open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
"""


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run four pieces of work, each in a confined child of one process. Return the children's answers by the
    names of the pieces, and the paths ``scratch`` and ``beside``."""
    scratch = tmp_path_factory.mktemp("scratch")
    places = {
        "home": str(Path.home()),
        "project": str(ROOT / "pyproject.toml"),
        "beside": str(scratch.parent / "beside"),
    }
    works = {
        "build": BUILD,
        "attempts": f"PLACES = {places!r}\n{ATTEMPTS}",
        "honest": OPEN + HONEST,
        "abort": ABORT,
    }
    return {**run(scratch, works), "scratch": str(scratch), "beside": places["beside"]}


def run(scratch: Path, works: dict[str, str]) -> dict[str, Any]:
    inner = scratch / "inner"
    inner.mkdir()
    environ = os.environ | {
        "QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a",
        "PYTHONPATH": str(ROOT / "src"), "CODA_AGENT_CACHE": str(scratch),
        "ANTHROPIC_API_KEY": "sk-secret", "AWS_SECRET_ACCESS_KEY": "x",
    }  # fmt: skip
    command = [sys.executable, "-c", PARENT, str(KERNELS), str(inner), json.dumps(works)]
    done = subprocess.run(command, env=environ, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_compile_works_after_its_parent_has_compiled(answers: dict[str, Any]) -> None:
    answer = answers["build"]
    assert "failed" not in answer, answer["failed"]
    assert answer["said"] == ["Finish1", "Step0"]


def test_every_layer_is_in_force_and_quick(answers: dict[str, Any]) -> None:
    for name in ("build", "attempts", "honest"):
        assert answers[name]["missing"] == []
        assert set(answers[name]["layers"]) >= {"parent_death", "undumpable", "limits", "landlock", "seccomp"}
    fastest = min(answers[name]["seconds"] for name in ("build", "attempts", "honest"))
    assert fastest < 0.05, f"{fastest * 1e3:.0f} ms"


def test_what_is_no_compile_is_refused(answers: dict[str, Any]) -> None:
    answer = answers["attempts"]
    assert "failed" not in answer, answer["failed"]
    said = answer["said"]
    assert len(said) == 48
    missing = {"device", "control device"} if not Path("/dev/nvidia0").exists() else set()
    others = {n: code for n, code in said.items() if code not in ("EPERM", "EACCES", "EBADF")}
    assert set(others) <= missing and set(others.values()) <= {"ENOENT"}, others
    assert not Path(answers["beside"]).exists()


def test_what_a_compile_needs_is_there(answers: dict[str, Any]) -> None:
    answer = answers["honest"]
    assert "failed" not in answer, answer["failed"]
    said = answer["said"]
    inner = str(Path(answers["scratch"]).resolve() / "inner")
    assert said["threads"] == [0, 1, 2, 3] and answer["session"] and said["CORE"] == [0, 0]
    assert said["CPU"] <= LIMITS["CPU"] and "too large" in said["long"]
    assert said["cwd"] == said["home"] == inner
    assert len(said["open"]) <= 4 and said["open"][:3] == [0, 1, 2]
    assert {"HOME", "TMPDIR", "QUACK_ARCH"} <= set(said["environment"])
    assert not {"ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "PATH"} & set(said["environment"])


def test_a_crash_is_told_by_its_signal(answers: dict[str, Any]) -> None:
    assert answers["abort"] == {"status": -signal.SIGABRT, "session": True}


def test_an_environment_without_secrets() -> None:
    given = {
        "ANTHROPIC_API_KEY": "x",
        "QUACK_ARCH": "90",
        "CUTE_DSL_ARCH": "sm_90a",
        "LC_ALL": "C",
        "PATH": "/",
    }
    assert set(environment(given)) == {"QUACK_ARCH", "CUTE_DSL_ARCH", "LC_ALL"}


def test_the_lists_of_calls_name_the_same_things() -> None:
    # aarch64 never had these system calls
    older = {"dup2", "access", "rename", "mkdir", "rmdir", "unlink", "readlink"}
    assert set(CALLS["x86_64"]) - set(CALLS["aarch64"]) == older
    assert set(CALLS["aarch64"]) <= set(CALLS["x86_64"])
    for numbers in CALLS.values():
        assert len(set(numbers.values())) == len(numbers)


def test_a_confined_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from coda_agent.primitives.raw.confine import confine
parent, (reading, answer) = os.getpid(), os.pipe()
if os.fork() == 0:
    confine(parent, Path(sys.argv[1]), keep=(answer,))
    os.write(answer, b"x")
    time.sleep(60)
os.read(reading, 1)
print("confined", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "confined\n"
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
    deadline = time.monotonic() + 2
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{child}").exists()
