"""Confine a process that compiles edited CuTeDSL. The process may only compute, read the compiler's files,
and write to a scratch folder.

An edited module is Python, and the compiler executes any code in the module. So before the child reads the
module, the child gives up the network, other processes and programs, and all inherited resources. The child
can read only the installed packages, the system's libraries and its scratch folder. Executable memory remains
allowed, because the compiler's engine needs such memory to link the host code that the engine exports.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from coda_agent.primitives.system import sandbox, subprocesses
from coda_agent.primitives.system.sandbox import Rule

LIMITS = {
    "CPU": 300,
    "FSIZE": 64 << 20,
    "NOFILE": 128,
    "DATA": subprocesses.MEMORY_BYTES,
    "CORE": 0,
}
# readable, because these packages import some of their modules only when they need them
PACKAGES = ("cutlass", "quack", "torch", "triton", "tvm_ffi", "numpy")
INSTALLED = ("site-packages", "dist-packages")
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
KEPT = ("CUTE_DSL_", "QUACK_", "LC_", "LANG")

# The allowed system calls. Compilations made most of these calls when we traced them. The other calls are
# variants that glibc uses on other systems, or are made by a process that aborts. chmod, chown, utime, link
# and truncate by path are left out, because Landlock does not cover them.
CALLS = {
    "x86_64": {
        "gettid": 186, **sandbox.CALLS["x86_64"],
        "newfstatat": 262, "fstat": 5, "lseek": 8, "openat": 257, "ioctl": 16, "fcntl": 72, "getrusage": 98,
        "sched_getaffinity": 204, "dup": 32, "dup2": 33, "getdents64": 217, "clone": 56, "clone3": 435,
        "set_robust_list": 273, "rseq": 334, "prctl": 157, "getpid": 39,
        "rt_sigaction": 13, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21,
        "sched_yield": 24, "nanosleep": 35, "uname": 63, "fsync": 74, "ftruncate": 77, "getcwd": 79,
        "rename": 82, "mkdir": 83, "rmdir": 84, "unlink": 87, "readlink": 89, "gettimeofday": 96,
        "sysinfo": 99, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110,
        "restart_syscall": 219, "clock_getres": 229, "clock_nanosleep": 230, "tgkill": 234, "mkdirat": 258,
        "unlinkat": 263, "renameat": 264, "readlinkat": 267, "faccessat": 269, "dup3": 292,
        "prlimit64": 302, "renameat2": 316, "statx": 332, "faccessat2": 439,
    },
    "aarch64": {
        "gettid": 178, **sandbox.CALLS["aarch64"],
        "newfstatat": 79, "fstat": 80, "lseek": 62, "openat": 56, "ioctl": 29, "fcntl": 25, "getrusage": 165,
        "sched_getaffinity": 123, "dup": 23, "getdents64": 61, "clone": 220, "clone3": 435,
        "set_robust_list": 99, "rseq": 293, "prctl": 167, "getpid": 172,
        "rt_sigaction": 134, "pread64": 67, "pwrite64": 68, "readv": 65, "writev": 66, "sched_yield": 124,
        "nanosleep": 101, "uname": 160, "fsync": 82, "ftruncate": 46, "getcwd": 17, "gettimeofday": 169,
        "sysinfo": 179, "getuid": 174, "getgid": 176, "geteuid": 175, "getegid": 177, "getppid": 173,
        "restart_syscall": 128, "clock_getres": 114, "clock_nanosleep": 115, "tgkill": 131, "mkdirat": 34,
        "unlinkat": 35, "renameat": 38, "readlinkat": 78, "faccessat": 48, "dup3": 24, "prlimit64": 261,
        "renameat2": 276, "statx": 291, "faccessat2": 439,
    },
}  # fmt: skip
_CLONE_THREAD = 0x10000
_CLONE_ASTRAY = 0x7E02_6000  # flags for new namespaces, vfork and inherited tracing
_TCGETS, _FIOCLEX = 0x5401, 0x5451  # Python makes these ioctls on every file
_PR_SET_NAME = 15
_DUPLICATE, _FLAGS = (0, 1030), (1, 2, 3, 4)  # allowed commands of fcntl: no locks, leases or signals


def _rules() -> dict[str, Rule]:
    return {
        "clone": Rule(0, none_of=_CLONE_ASTRAY, any_of=_CLONE_THREAD),
        # a filter cannot see clone3's flags, because they are in memory; on ENOSYS, glibc uses clone instead
        "clone3": Rule(values=(), error=errno.ENOSYS),
        "ioctl": Rule(1, values=(_TCGETS, _FIOCLEX)),
        "fcntl": Rule(1, values=_DUPLICATE + _FLAGS),
        "prctl": Rule(0, values=(_PR_SET_NAME,)),
        "prlimit64": Rule(0, values=(0,)),
        "tgkill": Rule(0, values=(os.getpid(),)),  # glibc aborts with tgkill
    }


def confine(
    parent: int, scratch: Path, *, keep: Collection[int] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Permanently give up all rights that compiling does not need. Call this in a single-threaded forked
    child.

    ``parent``: the id of the parent process. The child dies when the thread that forked the child dies.
    Descriptors in ``keep`` stay open. Descriptors 0, 1 and 2 lead to /dev/null if they are not in ``keep``;
    all other descriptors are closed. The working directory, HOME and TMPDIR become ``scratch``, an existing
    directory. Returns the names of the restrictions in force, and the names of the restrictions that this
    system lacks. An edited module may run only if ``landlock`` and ``seccomp`` are in force.
    """
    home = str(scratch.resolve())
    _leave(home, keep)
    layers: sandbox.Layers = (
        ("undumpable", sandbox.hide),
        ("no_new_privileges", sandbox.renounce_privileges),
        ("limits", partial(sandbox.limit_resources, LIMITS)),
        ("landlock", partial(sandbox.restrict_files, readable(), (home,))),
        ("seccomp", partial(sandbox.filter_system_calls, CALLS, _rules())),
    )
    return sandbox.apply(parent, layers)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that compiling needs, without keys and tokens.

    A forked child has a copy of its parent's memory, which may contain keys. So start the parent process with
    this environment.
    """
    return {name: value for name, value in given.items() if name.startswith(KEPT)}


def _leave(home: str, keep: Collection[int]) -> None:
    """Start a new session. Drop inherited variables and descriptors, and leave the working directory."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.chdir(home)
    kept = environment(os.environ)
    os.environ.clear()
    os.environ.update(kept | {"HOME": home, "TMPDIR": home})
    tempfile.tempdir = None
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2} - set(keep):
        os.dup2(nowhere, descriptor)
    low = 3
    for descriptor in sorted(d for d in keep if d > 2):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def readable() -> list[str]:
    """The readable paths: the standard library, installed packages, the project's ``primitives`` and the
    system's libraries. The project's other packages and the home directories are not readable."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in map(Path, (spec and spec.submodule_search_locations) or ()):
            found.add(str(next((p for p in place.parents if p.name in INSTALLED), place)))
    return sorted(found | {str(Path(__file__).parent.parent)}) + list(SYSTEM)
