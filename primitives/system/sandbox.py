"""Confine a process that runs code from a language model, by several independent layers of protection.

``apply()`` permanently removes the process's rights to start processes, to use files, sockets and executable
memory, and to reach other processes. Call it after all imports, and after all files are open. The default
layers are for tracing a kernel file; ``primitives.raw.confine`` chooses the layers for compiling edited code.
A layer is reported as missing if the system is not Linux, or if a container forbids the layer. This module
imports only the standard library, because the jail's child process imports it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

MEMORY_BYTES = 768 << 20
CPU_SECONDS = 3
DESCRIPTORS = 8

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38


Layers = tuple[tuple[str, Callable[[], None]], ...]


def apply(parent: int, wanted: Layers | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Apply every layer, weakest first. ``parent``: the id of the parent process. When the parent ends, this
    process ends too. ``wanted``: layers that replace the default layers.

    Returns the names of the layers in force, and the names of the missing layers.
    """
    layers: list[str] = []
    missing: list[str] = []
    first: tuple[str, Callable[[], None]] = ("parent_death", partial(die_with, parent))
    for name, layer in (first, *(LAYERS if wanted is None else wanted)):
        try:
            layer()
        except OSError:
            missing.append(name)
        else:
            layers.append(name)
    return tuple(layers), tuple(missing)


def die_with(parent: int) -> None:
    """Make Linux kill this process as soon as the thread that started this process ends, for any reason."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent had already ended, so no signal would come


def hide() -> None:
    """Prevent core dumps, and debugging by the same user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def renounce_privileges() -> None:
    """Give up the right to gain privileges, as Landlock and seccomp require."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


# The process may use 768 MB of address space, 3 s of CPU time and 8 descriptors. It may not write to files or
# start processes.
TRACING_LIMITS = {
    "AS": MEMORY_BYTES,
    "CPU": CPU_SECONDS,
    "FSIZE": 0,
    "NOFILE": DESCRIPTORS,
    "NPROC": 0,  # this does not limit root, but seccomp also forbids new processes
    "CORE": 0,
}


def limit_resources(limits: Mapping[str, int] = TRACING_LIMITS) -> None:
    """Lower these limits of this process, and never raise a limit. A limit's name is that of a constant of
    ``resource``, without RLIMIT_."""
    refused = [name for name, limit in limits.items() if not _limit(name, limit)]
    if refused:  # for example, macOS has no limit on address space; the other limits still apply
        raise OSError(errno.ENOTSUP, f"no limit on {', '.join(refused)}")


def _limit(name: str, limit: int) -> bool:
    """Set a limit; return whether the system accepts it."""
    try:
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # At the soft limit the process gets SIGXCPU, which shows the reason. At the hard limit it would get
        # SIGKILL, which does not show the reason.
        spare = 1 if name == "CPU" and limit != hard else 0
        resource.setrlimit(kind, (limit, limit + spare))
    except (AttributeError, OSError, ValueError):
        return False
    return True


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_LANDLOCK_VERSION = 1
_LANDLOCK_PATH = 1
# The rights that each version of Landlock's ABI knows. Linux rejects a right that its version does not know,
# so this process requests only the rights of that version.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of low bits, by ABI version
_TCP_RIGHTS = 0b11  # bind, connect: since ABI 4
_SCOPES = 0b11  # abstract sockets, signals: since ABI 6
_READ_FILE, _READ = 1 << 2, 1 << 2 | 1 << 3
# The rights to read, write, truncate, remove, rename, and make files and directories, but not to make
# devices, sockets or links.
_WRITE = _READ | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14


def restrict_files(readable: Iterable[str] = (), writable: Iterable[str] = ()) -> None:
    """Restrict the process with Landlock. The process may read under the ``readable`` paths, and read and
    write under the ``writable`` directories. Landlock denies every other right that Landlock knows. A missing
    path grants nothing."""
    abi = _syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    files = (1 << _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]) - 1
    # Linux accepts unknown fields if they are zero
    rules = struct.pack("QQQ", files, _TCP_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    ruleset = _syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    try:
        for path in readable:
            _grant(ruleset, path, files & (_READ if os.path.isdir(path) else _READ_FILE))
        for path in writable:
            _grant(ruleset, path, files & _WRITE)
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _grant(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    try:
        _syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


# System calls that a running interpreter needs for memory, locks, its two pipes and its exit. The list has no
# open, exec or clone.
CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
        "rt_sigprocmask": 14, "rt_sigreturn": 15, "mremap": 25, "madvise": 28, "exit": 60, "sigaltstack": 131,
        "futex": 202, "clock_gettime": 228, "exit_group": 231, "getrandom": 318,
    },
    "aarch64": {
        "read": 63, "write": 64, "close": 57, "mmap": 222, "mprotect": 226, "munmap": 215, "brk": 214,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "mremap": 216, "madvise": 233, "exit": 93,
        "sigaltstack": 132, "futex": 98, "clock_gettime": 113, "exit_group": 94, "getrandom": 278,
    },
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_PROT_EXEC = 4
_SECCOMP_MODE_FILTER = 2


class Rule(NamedTuple):
    """A condition on one argument of an allowed system call, and the error if the condition does not hold.
    ``argument``: the argument's position. The condition is on the low 32 bits: they must contain no bit of
    ``none_of``. If ``any_of`` is not 0, they must contain a bit of ``any_of``. If ``values`` is not None,
    they must equal one of the ``values``."""

    argument: int = 0
    none_of: int = 0
    any_of: int = 0
    values: tuple[int, ...] | None = None
    error: int = errno.EPERM


TRACING_RULES = {"mmap": Rule(2, none_of=_PROT_EXEC), "mprotect": Rule(2, none_of=_PROT_EXEC)}


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(
    calls: Mapping[str, Mapping[str, int]] = CALLS, rules: Mapping[str, Rule] = TRACING_RULES
) -> None:
    """Filter system calls with seccomp. ``calls``: for each machine, the numbers of the allowed calls by
    name, with the most frequent call first. Any other call fails with EPERM. ``rules``: conditions on the
    allowed calls. A call that breaks its rule fails with the rule's error.

    A forbidden call fails instead of killing the process, so that the kernel's author gets an exception to
    read.
    """
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    program = _assemble(_AUDIT_ARCH[machine], calls[machine], rules)
    description = _Filter(len(program) // 8, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(description))


def _assemble(arch: int, calls: Mapping[str, int], rules: Mapping[str, Rule]) -> bytes:
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    code = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, arch), refuse]
    code.append((_LOAD, 0, 0, _NUMBER))  # x32 calls on x86 have an extra bit, so they match no number below
    for name, number in calls.items():
        answer = _answer(rules[name]) if name in rules else [(_RETURN, 0, 0, _ALLOW)]
        code += [(_JUMP_EQUAL, 0, len(answer), number), *answer]
    code.append(refuse)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _answer(rule: Rule) -> list[tuple[int, int, int, int]]:
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | rule.error)
    code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument)]  # little-endian: the low half comes first
    if rule.none_of:
        code += [(_JUMP_ANY_BIT, 0, 1, rule.none_of), refuse]
    if rule.any_of:
        code += [(_JUMP_ANY_BIT, 1, 0, rule.any_of), refuse]
    if rule.values is None:
        return [*code, allow]
    for value in rule.values:
        code += [(_JUMP_EQUAL, 0, 1, value), allow]
    return [*code, refuse]


LAYERS: Layers = (
    ("undumpable", hide),
    ("no_new_privileges", renounce_privileges),
    ("limits", limit_resources),
    ("landlock", restrict_files),
    ("seccomp", filter_system_calls),
)


def _prctl(option: int, argument: int, address: int = 0) -> None:
    words = [ctypes.c_ulong(word) for word in (argument, address, 0, 0)]  # prctl reads all four as full words
    _called("prctl", option, *words)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _called("syscall", ctypes.c_long(number), *words)


def _called(function: str, *arguments: object) -> int:
    """Call a libc function. Raises OSError if the function fails, or if this system is not Linux."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{function}: not on {sys.platform}")
    result = int(getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result
