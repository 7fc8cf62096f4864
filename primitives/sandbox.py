"""What the operating system denies to the process that traces a kernel: layers, each of use alone.

``apply()`` drops, for the calling process and for good, whatever it can: new processes, files,
sockets, executable memory, other processes. Call it when everything needed is imported and open.
Linux only; elsewhere, and in containers that forbid it, a layer is reported as missing.
Standard library only: the jail's child imports this module.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial

MEMORY_BYTES = 768 << 20
CPU_SECONDS = 3
DESCRIPTORS = 8

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38


def apply(parent: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Put every layer in force, weakest first; ``parent`` is the process id to die with.

    Returns the names of (those in force, those missing).
    """
    layers: list[str] = []
    missing: list[str] = []
    first: tuple[str, Callable[[], None]] = ("parent_death", partial(die_with, parent))
    for name, layer in (first, *LAYERS):
        try:
            layer()
        except OSError:
            missing.append(name)
        else:
            layers.append(name)
    return tuple(layers), tuple(missing)


def die_with(parent: int) -> None:
    """Be killed when the parent (its thread that started us) ends, whatever ends it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before its death could reach us


def hide() -> None:
    """Neither a core dump nor a debugger of the same user can read this process."""
    _prctl(_PR_SET_DUMPABLE, 0)


def renounce_privileges() -> None:
    """No setuid file can give anything back; Landlock and seccomp require it."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit_resources() -> None:
    """768 MB of addresses, 3 s of CPU, no byte into any file, 8 descriptors, no process beside this one."""
    limits = {
        "AS": MEMORY_BYTES,
        "CPU": CPU_SECONDS,
        "FSIZE": 0,
        "NOFILE": DESCRIPTORS,
        "NPROC": 0,  # does not bind root, hence seccomp
        "CORE": 0,
    }
    refused = [name for name, limit in limits.items() if not _limit(name, limit)]
    if refused:  # macOS has no limit on addresses, say: the others hold all the same
        raise OSError(errno.ENOTSUP, f"no limit on {', '.join(refused)}")


def _limit(name: str, limit: int) -> bool:
    """Whether the system takes it."""
    try:
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # At the hard limit the kernel sends SIGKILL, which says nothing; at the soft one SIGXCPU.
        spare = 1 if name == "CPU" and limit != hard else 0
        resource.setrlimit(kind, (limit, limit + spare))
    except (AttributeError, OSError, ValueError):
        return False
    return True


_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same number on every architecture
_LANDLOCK_VERSION = 1
# Rights known to Landlock's ABI n; a right that a kernel does not know is an error, so ask for its own.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of low bits
_TCP_RIGHTS = 0b11  # bind, connect: since ABI 4
_SCOPES = 0b11  # abstract sockets, signals: since ABI 6


def deny_files() -> None:
    """Landlock: a ruleset that handles every right and grants none."""
    abi = _syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    files = (1 << _FILE_RIGHTS[min(abi, max(_FILE_RIGHTS))]) - 1
    # A kernel accepts the fields it does not know as long as they are zero.
    rules = struct.pack("QQQ", files, _TCP_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    ruleset = _syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    try:
        _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


# What a running interpreter needs: memory, locks, its two pipes, its end. No open, no exec, no clone.
_CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "munmap": 11, "brk": 12, "rt_sigprocmask": 14,
        "rt_sigreturn": 15, "mremap": 25, "madvise": 28, "exit": 60, "sigaltstack": 131, "futex": 202,
        "clock_gettime": 228, "exit_group": 231, "getrandom": 318,
    },
    "aarch64": {
        "read": 63, "write": 64, "close": 57, "munmap": 215, "brk": 214, "rt_sigprocmask": 135,
        "rt_sigreturn": 139, "mremap": 216, "madvise": 233, "exit": 93, "sigaltstack": 132, "futex": 98,
        "clock_gettime": 113, "exit_group": 94, "getrandom": 278,
    },
}  # fmt: skip
_MAPPING_CALLS = {"x86_64": {"mmap": 9, "mprotect": 10}, "aarch64": {"mmap": 222, "mprotect": 226}}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCH, _PROTECTION = 0, 4, 32  # offsets in seccomp_data; the third argument's low half
_PROT_EXEC = 4
_SECCOMP_MODE_FILTER = 2


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls() -> None:
    """seccomp: everything but ``_CALLS`` and non-executable mappings fails with EPERM.

    EPERM, not death: whatever a kernel tried becomes an exception that its author can read.
    """
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    program = _assemble(machine)
    description = _Filter(len(program) // 8, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(description))


def _assemble(machine: str) -> bytes:
    code = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _REFUSE)]
    code.append((_LOAD, 0, 0, _NUMBER))  # x86's x32 calls carry a bit of their own, so match none below
    for number in _CALLS[machine].values():
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number in _MAPPING_CALLS[machine].values():
        code += [
            (_JUMP_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _PROTECTION),
            (_JUMP_ANY_BIT, 0, 1, _PROT_EXEC),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


LAYERS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("undumpable", hide),
    ("no_new_privileges", renounce_privileges),
    ("limits", limit_resources),
    ("landlock", deny_files),
    ("seccomp", filter_system_calls),
)


def _prctl(option: int, argument: int, address: int = 0) -> None:
    words = [ctypes.c_ulong(word) for word in (argument, address, 0, 0)]  # it reads all, each a full word
    _called("prctl", option, *words)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _called("syscall", ctypes.c_long(number), *words)


def _called(function: str, *arguments: object) -> int:
    """A libc function's result; OSError where it fails, or where this system has none such."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{function}: not on {sys.platform}")
    result = int(getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result
