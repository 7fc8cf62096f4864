"""Cheats by a child that has been taken over. No language check stops such a child, so it may say and try
whatever a process can."""

from __future__ import annotations

from cheats.corpus import Cheat, Contained, Rejection, rejected
from cheats.twins import RMSNORM

FORGED = '{"status": "accepted", "program": "{}", "lines": []}'


def says(name: str, tries: str, lines: str, ends: Rejection | Contained, after: str = "") -> Cheat:
    """Return a cheat whose child executes ``lines`` before it has the honest program as its answer, and
    ``after`` afterwards."""
    return Cheat(name, tries, RMSNORM, f"{lines}\n{RMSNORM.sent}{after}", ends, taken_over=True)


def refused(name: str, tries: str, lines: str, before: str = "pass") -> Cheat:
    """Return a cheat with lines that the operating system must refuse. If it allows them, the child never
    sends its program."""
    body = "".join(f"    {line}\n" for line in lines.splitlines())
    attempt = f"try:\n{body}except (OSError, RuntimeError, ValueError):\n    pass\nelse:\n    os._exit(9)"
    return says(name, tries, f"import os\n{before}\n{attempt}", Contained())


C = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def c(function, *arguments):
    if getattr(libc, function)(*arguments) in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), function)
"""
REFUSED = (
    refused("a file", "Leaves itself where it is run from.", "open('was-here', 'w').write('x')"),
    refused(
        "a file in /dev/shm", "Leaves itself in memory that outlives it.", "open('/dev/shm/was-here', 'w')"
    ),
    refused("reading a file", "Looks for keys.", "open('/etc/passwd')"),
    refused(
        "reading its parent", "Looks into the verifier's memory.", "open(f'/proc/{os.getppid()}/mem', 'rb')"
    ),
    refused(
        "writing to its parent",
        "Changes the verifier's memory.",
        "c('process_vm_writev', os.getppid(), 0, 0, 0, 0, 0)",
        before=C,
    ),
    refused(
        "tracing its parent",
        "Attaches a debugger to the verifier.",
        "c('ptrace', 16, os.getppid(), 0, 0)",
        before=C,
    ),
    refused("a fork", "Goes on in a process of its own.", "if os.fork() == 0:\n    os._exit(0)"),
    refused(
        "a thread",
        "Goes on beside the answer.",
        "_thread.start_new_thread(print, ())",
        before="import _thread",
    ),
    refused("a program", "Becomes another program.", "os.execv('/bin/sh', ['sh', '-c', 'echo accepted'])"),
    refused(
        "killing its parent",
        "No verifier, no verdict: 0 asks whether 9 would reach it.",
        "os.kill(os.getppid(), 0)",
    ),
    refused("a socket", "Calls home.", "socket.socket()", before="import socket"),
    refused(
        "higher limits",
        "Takes more time and memory.",
        "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        before="import resource",
    ),
    refused(
        "machine code",
        "Runs what no interpreter sees.",
        "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
        before="import mmap",
    ),
    refused(
        "shared memory", "Leaves a message for the next kernel.", "c('shmget', 4242, 4096, 0o1600)", before=C
    ),
)
FORGERIES = (
    says(
        "words on its output",
        "Prints a verdict where a parent's output would be.",
        f"import os\nos.write(1, b'{FORGED}\\n')\nos.write(2, b'{FORGED}\\n')\nprint('accepted')",
        Contained(),
    ),
    says(
        "a last word",
        "Sends a second answer while the interpreter ends.",
        "import atexit, os\nclass Late:\n    def __del__(self):\n        os.write(3, b'{}\\n')\n"
        "late = Late()\natexit.register(os.write, 3, b'{}\\n')",
        Contained(),
    ),
    says(
        "an answer before the answer",
        "The parent may read the first of two.",
        f"import os\nos.write(3, b'{FORGED}\\n')",
        rejected("trace", "forged", "not a result of the tracer"),
    ),
    says(
        "a verdict for an answer",
        "Sends a report instead of a program.",
        f"import os\nos.write(3, b'{FORGED}\\n')\nos._exit(0)",
        rejected("trace", "forged", "not a result of the tracer"),
    ),
    says(
        "a text that lies",
        "A string whose length and equality are its own.",
        "class Text(str):\n"
        "    def __len__(self):\n        return 2\n"
        "    def __eq__(self, other):\n        return True\n"
        "    __hash__ = str.__hash__\n    __str__ = __repr__ = lambda self: '{}'",
        Contained(),
        after="answer['program'] = Text(answer['program'])",
    ),
    says(
        "a patched vocabulary",
        "Changes the rules where it is, which is not where they are applied.",
        "import coda_agent.primitives.lang.ir as ir, coda_agent.verifier.sandbox.jail_child as j\n"
        "ir.MAX_NODES = 10**9\nir.OPERATIONS.clear()\n"
        "ir.Program.check = lambda self, lines=None: self",
        Contained(),
    ),
    says(
        "a crash",
        "Reads where nothing is.",
        "import ctypes\nctypes.string_at(1)",
        rejected("trace", "crashed", "SIGSEGV"),
    ),
    says(
        "an abort",
        "Leaves a core file.",
        "import os\nos.abort()",
        rejected("trace", "crashed", "without a result"),
    ),
    says(
        "a closed descriptor",
        "Breaks off what the parent listens to.",
        "import os\nos.closerange(0, 16)",
        rejected("trace", "crashed", "without a result"),
    ),
)
CHEATS = (*REFUSED, *FORGERIES)
