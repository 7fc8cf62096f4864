"""Cheats by a confined child: its actions and its answers. The text of the child has passed all checks of the
language."""

from __future__ import annotations

from cheats.corpus import Cheat, Contained, Rejection, rejected
from cheats.raw.twin import BASES, TWIN, indented
from coda_agent.primitives.system.files import cache_dir


def bare(name: str, tries: str, lines: str, ends: Rejection | Contained) -> Cheat:
    """Return a cheat with code at module level, which no check of the language stops."""
    edit = TWIN.cheat(name, tries, {BASES: f"\n{lines}{BASES}"}, ends)
    return Cheat(name, tries, TWIN, edit.source, ends, taken_over=True)


def refused(name: str, tries: str, lines: str) -> Cheat:
    """Return a cheat with lines that the operating system must refuse. If it allows them, the compile gate's
    message differs."""
    said = f"try:\n{indented(lines, 4)}except OSError:\n    raise SystemExit('refused')\n"
    code = f"import os\n{said}raise SystemExit('allowed')"
    return bare(name, tries, code, rejected("compile", "compiler", "SystemExit: refused"))


C = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.{call} in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno())"""
CONFINED = (
    refused("a socket", "Calls home.", "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)"),
    refused("a socket beside", "Talks to a neighbour.", "import socket\nsocket.socketpair()"),
    refused("somebody's files", "Looks for keys.", "os.listdir(os.path.expanduser('~root'))"),
    refused("the system's files", "Looks for names.", "open('/etc/passwd')"),
    refused(
        "the cache",
        "Writes what others will load.",
        f"os.makedirs({str(cache_dir() / 'raw' / 'mine')!r})",
    ),
    refused("a temporary file", "Leaves itself where all may write.", "open('/tmp/was-here', 'w')"),
    refused("shared memory", "Leaves itself in memory.", "open('/dev/shm/was-here', 'w')"),
    refused("the compiler", "Changes what others compile with.", "import quack\nopen(quack.__file__, 'a')"),
    refused(
        "the checks",
        "Changes what judges it.",
        "import coda_agent.primitives.raw as r\nopen(r.__file__, 'a')",
    ),
    refused("a process", "Goes on in a process of its own.", "if os.fork() == 0:\n    os._exit(0)"),
    refused("a program", "Becomes another.", "os.execv('/bin/true', ['true'])"),
    refused("its parent's memory", "Reads who judges it.", "open(f'/proc/{os.getppid()}/mem', 'rb')"),
    refused(
        "its parent's memory, by a call",
        "Writes there.",
        C.format(call="process_vm_writev(os.getppid(), 0, 0, 0, 0, 0)"),
    ),
    refused("its parent's life", "No judge, no verdict.", "os.kill(os.getppid(), 0)"),
    refused("a GPU", "Runs before it is judged.", "os.open('/dev/nvidia0', os.O_RDWR)"),
    refused(
        "a way out of its scratch",
        "A link that its parent may follow.",
        "os.symlink('/etc/passwd', 'link')",
    ),
)
# The child has one descriptor left, through which it answers. The callers of its code know where the object
# goes.
INSIDE = """import json, os, sys, time
for pipe in range(3, 64):
    try:
        os.fstat(pipe)
        break
    except OSError:
        pass
frame = sys._getframe()
while 'target' not in frame.f_locals:
    frame = frame.f_back
target = frame.f_locals['target']
done = b'{"stages": null, "seconds": 1.0}'
"""


def says(name: str, tries: str, lines: str, ends: Rejection | Contained) -> Cheat:
    """Return a cheat whose child answers instead of compiling."""
    return bare(name, tries, INSIDE + lines, ends)


END = "os.write(pipe, done)\nos._exit(0)"
ANSWERS = (
    says(
        "success without an object", "Says that all is well.", END,
        rejected("compile", "no_object", "left no object"),
    ),
    says(
        "garbage for an object", "The loader may stumble.", f"target.write_bytes(b'x' * 4096)\n{END}",
        rejected("compile", "object", "not a 64-bit"),
    ),
    says(
        "a library for an object",
        "All that it needs is in there.",
        f"import torch\ntarget.write_bytes(open(torch._C.__file__, 'rb').read())\n{END}",
        rejected("compile", "object", "not relocatable"),
    ),
    says(
        "a folder for an object", "Reading it is an error.", f"target.mkdir()\n{END}",
        rejected("compile", "no_object", "not a file"),
    ),
    says(
        "an object without end", "All the memory of its parent.",
        f"with target.open('wb') as file:\n    file.truncate(1 << 25)\n{END}",
        rejected("compile", "object", "over"),
    ),
    says(
        "checks that pass", "Changes them where it is, which is not where they are applied.",
        "import coda_agent.primitives.raw as r\nr.inspect = r.same_host = lambda *data: b'yes'\n"
        f"target.write_bytes(b'x')\n{END}",
        rejected("compile", "object", "not a 64-bit"),
    ),
    says(
        "an answer before the answer", "The parent may read the first of two.", "os.write(pipe, done)",
        rejected("compile", "forged", "no valid answer"),
    ),
    says(
        "an answer that is none", "Numbers that no compile has.",
        "done = done.replace(b'1.0', b'NaN')\n" + END, rejected("compile", "forged", "not an answer"),
    ),
    says(
        "an answer too deep", "Its parent's parser runs out of stack.",
        "done = b'[' * 100000\n" + END, rejected("compile", "forged", "no valid answer"),
    ),
    says(
        "a flood", "Its parent listens until its memory is full.",
        "while True:\n    os.write(pipe, b'x' * 65536)", rejected("compile", "forged", "over 1048576 bytes"),
    ),
    says(
        "words that steer a terminal", "Clears the screen, and is no text.",
        "raise SystemExit(chr(27) + '[2J' + chr(27) + 'c' + chr(0xd800) + 'words')",
        rejected("compile", "compiler", "SystemExit: ?c?words"),
    ),
    says(
        "a line that is nowhere", "Who shows the line looks for it.",
        "os.write(pipe, b'{\"code\": \"numerics\", \"message\": \"?\", \"line\": 99999}')\nos._exit(0)",
        rejected("compile", "numerics", "?"),
    ),
    says(
        "silence", "Hangs up, and goes on.", "os.closerange(0, 64)\nwhile True:\n    time.sleep(1)",
        rejected("compile", "compiler_died", "status -9"),
    ),
    says(
        "no end", "Waits for its parent to give up.", "time.sleep(1000)",
        rejected("compile", "slow_compile", "did not end"),
    ),
    says("a crash", "Reads where nothing is.", "import ctypes\nctypes.string_at(1)",
         rejected("compile", "compiler_died", "status -11")),
    says(
        "a thread that goes on", "Writes beside the compile, and after it.",
        "import threading\ndef write():\n    for number in range(10**9):\n"
        "        open(f'more{number % 99}', 'w').close()\n        time.sleep(0.001)\n"
        "threading.Thread(target=write, daemon=True).start()",
        Contained(),
    ),
    says(
        "a full disk",
        "File after file, each within its limit.",
        "for number in range(1 << 12):\n    open(f'more{number}', 'wb').write(bytes(1 << 24))",
        rejected("compile", "files", "over 268435456 bytes"),
    ),
    says(
        "folders within folders", "Deeper than a path is long, and closed to who would remove them.",
        "at = os.open('.', os.O_RDONLY)\nfor depth in range(1100):\n    os.mkdir('d' * 9, 0o300, dir_fd=at)\n"
        "    low = os.open('d' * 9, os.O_PATH, dir_fd=at)\n    os.close(at)\n    at = low\n"
        "os.mkdir('closed', 0)",
        rejected("compile", "files", "cannot be listed"),
    ),
    says(
        "a module for the next", "Compiled code where Python looks for it.",
        "import importlib.util\nplace = importlib.util.cache_from_source(__file__)\n"
        "os.makedirs(os.path.dirname(place), exist_ok=True)\nopen(place, 'wb').write(b'x')",
        Contained(),
    ),
)  # fmt: skip
