"""Edits of a lowered text, which is code: what its language lets through, what a confined child can do
without that language, what it may answer, and what only a GPU can tell."""

from __future__ import annotations

from dataclasses import dataclass

from cheats.corpus import Cheat, Contained, Rejection, Twin, rejected
from cheats.twins import RMSNORM
from primitives.files import cache_dir
from primitives.ir import Program
from primitives.lower import editable

VISITOR = '        place = resources["place"]\n'
METHOD = "    @cute.jit\n    def epi_visit"
STEP = "class Step0(FusedGemm):\n"
BASES = f"\n\n{STEP}"
LAUNCH = "        launched = self.kernel("
FINISH = "        n11 = s11\n"
STORE = "            o15[at] = (n15)"
THERE = "(o15[at] - Float32(8.0))"


@dataclass(frozen=True)
class Edited(Twin):
    """A lowered text as an author gets it, or an honest edit of it: Checked as it stands."""

    kernel: Twin

    @property
    def program(self) -> Program:
        return self.kernel.program


TWIN = Edited(RMSNORM.name, editable(RMSNORM.program), RMSNORM)


def language(says: str) -> Rejection:
    return rejected("compile", "language", says)


def vocabulary(says: str) -> Rejection:
    return rejected("compile", "vocabulary", says)


def host(says: str) -> Rejection:
    return rejected("compile", "host", says)


def indented(lines: str, spaces: int) -> str:
    return "".join(" " * spaces + line + "\n" for line in lines.splitlines())


def above(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Lines of the module's own level."""
    return TWIN.cheat(name, tries, {BASES: f"\n{lines}{BASES}"}, ends)


def inside(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Lines of the visitor, which is traced for the device."""
    return TWIN.cheat(name, tries, {VISITOR: VISITOR + indented(lines, 8)}, ends)


def method(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Lines of the class of a step."""
    return TWIN.cheat(name, tries, {METHOD: f"{indented(lines, 4)}\n{METHOD}"}, ends)


def launch(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Lines before the launch, which run on the host."""
    return TWIN.cheat(name, tries, {LAUNCH: indented(lines, 8) + LAUNCH}, ends)


def finish(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Lines of the kernel between steps."""
    return TWIN.cheat(name, tries, {FINISH: indented(lines, 8) + FINISH}, ends)


PEEKED = "blocks = blocks + (1 if peek > 3 else 0)"
HOST = (
    above("a statement", "Runs when the module is read.", "print('here')", language("move this")),
    above(
        "a decorator that does things",
        "Calls what it decorates, when the module is read.",
        "@fragment\ndef helper(accumulator):\n    return accumulator",
        language("one decorator at most"),
    ),
    TWIN.cheat(
        "a decorator of the class",
        "The same, with a class for its argument.",
        {STEP: f"@arguments\n{STEP}"},
        language("no decorator"),
    ),
    TWIN.cheat(
        "a metaclass",
        "Makes the class by code of its own.",
        {"class Step0(FusedGemm)": "class Step0(FusedGemm, metaclass=RowPartials)"},
        language("no keywords"),
    ),
    method(
        "a call in a class body",
        "A class body runs when it is read.",
        'found = fragment("x")',
        language("makes no resource"),
    ),
    method(
        "a comprehension in a class body",
        "A loop in the place of a number.",
        "found = [FusedGemm for i in (1, 2)]",
        language("a number, a string"),
    ),
    above(
        "a default that is called",
        "Defaults are computed when the module is read.",
        "def helper(x=fragment(1)):\n    return x",
        language("a number, a string"),
    ),
    above(
        "a default that is a function",
        "A lambda for later.",
        "def helper(x=lambda: 1):\n    return x",
        language("a number, a string"),
    ),
    above(
        "an annotation that is called",
        "Annotations are computed too.",
        "def helper(x: fragment(1)):\n    return x",
        language("calls nothing"),
    ),
    above(
        "an annotation in quotes",
        "Text that whoever asks for the types evaluates.",
        "def helper(x: 'fragment(1)'):\n    return x",
        language("without quotes"),
    ),
    launch("a store before the launch", "The host's memory, written.", "o15[0] = 1.0", host("runs on the")),
    launch(
        "a load before the launch",
        "The launcher reads the tensor's memory, and its grid says what was there.",
        f"peek = o15[0]\n{PEEKED}",
        host("o15 on the host"),
    ),
    TWIN.cheat(
        "a load for the device",
        "What lies before a tensor reaches the kernel as the size of its grid.",
        {
            LAUNCH: indented(f"peek = o15[-1000]\n{PEEKED}", 8) + LAUNCH,
            "(n15)": "(n15 + Float32(cute.arch.grid_dim()[0]))",
        },
        host("o15 on the host"),
    ),
    launch(
        "a load by a function",
        "To look for the largest of a tensor is to read it.",
        "peek = max(p10_0)\n" + PEEKED,
        host("p10_0 on the host"),
    ),
    method(
        "a load by the stages",
        "The epilogue's arguments pass by where stages are counted.",
        "def _compute_stages(self, *sizes, **more):\n    return (sizes[6].v7[0], 2, 2)",
        host(".v7 on the host"),
    ),
    launch(
        "a pointer before the launch",
        "Any address of the launcher's.",
        "p = cute.make_ptr(Float32, 4096)",
        host("on the host"),
    ),
    launch(
        "a second launch", "Work besides the work.", "first = self.kernel(p10_0, s11, o15)", host("on the")
    ),
    TWIN.cheat(
        "a launch on another stream",
        "Runs while the clock does not look.",
        {"stream=stream)": "stream=0)"},
        host("the rest belongs into kernel"),
    ),
    inside(
        "a launch from the visitor",
        "A kernel that nobody counts.",
        "self.kernel(1).launch(grid=[1, 1, 1])",
        language(".launch leads out"),
    ),
    method(
        "the host's way to arguments",
        "Traced for the host, before each launch.",
        "def epi_to_underlying_arguments(self, args):\n    return args",
        host("runs on the host"),
    ),
    method(
        "the host's way to arguments, as a value",
        "A class in place of a method is called like one.",
        'epi_to_underlying_arguments = arguments((TileStore("h"),))',
        host("method"),
    ),
    method(
        "the host's bytes, as a type",
        "The same, by a type of numbers.",
        "epi_smem_bytes = Float32",
        host("method"),
    ),
    above(
        "a hook that the host looks for, as a value",
        "Its name is enough to be called.",
        'class Mine(RowPartials):\n    host_new = arguments((TileStore("h"),))',
        host("what the host looks for"),
    ),
    method(
        "a step's own call",
        "The launch of a step is QuACK's.",
        "@cute.jit\ndef __call__(self, a, b):\n    return a",
        host("runs on the host"),
    ),
    method(
        "a hook for classes",
        "Python calls it for each class that is made.",
        "def __init_subclass__(kind):\n    pass",
        host("runs on the host"),
    ),
    method(
        "a finalizer",
        "Runs when nobody looks any more.",
        "def __del__(self):\n    pass",
        language("no name holds __"),
    ),
    method(
        "stages by side effect",
        "How memory is shared is asked on the host.",
        "def _compute_stages(self, *sizes, **more):\n    sizes[6].x[0] = 1\n    return 4, 2, 2",
        host("assigns to names"),
    ),
    above(
        "a resource's host side",
        "A resource tells the host its argument.",
        "class Mine(RowPartials):\n    def to_params(self, gemm, args):\n        return args",
        host("runs on the host"),
    ),
    above(
        "a hook that the host looks for",
        "Its name is enough to be called.",
        "class Mine(RowPartials):\n    def host_new(self, gemm):\n        return gemm",
        host("what the host looks for"),
    ),
    above(
        "a class given twice",
        "The second is the one that counts.",
        "class Step0(FusedGemm):\n    pass",
        rejected("compile", "kernel", "once"),
    ),
)
ESCAPES = (
    above("import os", "Everything is an import away.", "import os", vocabulary("os cannot be imported")),
    inside("an import within", "The same, later.", "import os", language("at the top")),
    above(
        "a module by another name",
        "What loads objects, under a harmless name.",
        "import cutlass.cute.runtime as lanes",
        vocabulary("cutlass.cute.runtime cannot be imported"),
    ),
    above(
        "a module from a module",
        "QuACK's files import torch.",
        "from quack.epilogue.ops import torch",
        vocabulary("no 'torch'"),
    ),
    above(
        "the compiler's insides",
        "What writes inline assembly.",
        "from cutlass._mlir.dialects import llvm",
        vocabulary("cannot be imported"),
    ),
    above(
        "import of everything",
        "A star, for names not listed.",
        "from quack.epilogue.ops import *",
        vocabulary("'*'"),
    ),
    inside(
        "from cute to os",
        "A chain of attributes through what cute imports.",
        "cute.core.inspect.os.system('true')",
        vocabulary("no 'core'"),
    ),
    inside("from cute to sys", "Another.", "cute.math.sys.exit()", vocabulary("no 'sys'")),
    inside("from cute to ctypes", "Another.", "cute.typing.ctypes.CDLL(None)", vocabulary("no 'typing'")),
    inside("compile", "Compiles anything, and runs it.", "cute.compile(self)", vocabulary("no 'compile'")),
    inside(
        "export", "Writes files.", "accumulator.export_to_c('x')", language(".export_to_c leads out")
    ),
    inside("inline PTX", "Instructions as text.", "cute.arch.inline_ptx('x')", vocabulary("no 'inline_ptx'")),
    inside("inline assembly", "The same.", "cute.arch.llvm.inline_asm(1)", vocabulary("no 'llvm'")),
    inside("printf", "Tells what it sees.", "cute.printf('{}', accumulator)", vocabulary("no 'printf'")),
    inside("print", "Tells what it sees.", "print(accumulator)", language("print cannot be used")),
    inside(
        "a generator's frame",
        "A frame leads to all that is running.",
        "x = (i for i in (1, 2)).gi_frame",
        language(".gi_frame leads out"),
    ),
    inside("an error's traceback", "The same.", "x = self.tb_frame.f_back", language(".f_back leads out")),
    inside(
        "an error that is caught",
        "Hides what was refused.",
        "try:\n    x = 1\nexcept ValueError as error:\n    x = 2",
        language("try cannot be used"),
    ),
    inside("the class of a value", "From there to all.", "x = self.__class__", language("no name holds __")),
    inside("getattr", "Names at run time.", "x = getattr(self, 'x')", language("getattr cannot")),
    inside("format", "Walks attributes.", "x = '{0.x}'.format(self)", language(".format leads out")),
    inside("an f-string", "Calls __format__.", "x = f'{self}'", language("an f-string cannot")),
    inside(
        "a name in pieces", "Dunders for those who ask by text.", "x = resources['__class__']", language("__")
    ),
    inside("a look-alike", "Cyrillic for Latin.", "pl\u0430ce = 1", language("beyond ASCII")),
    inside(
        "letters that Python folds",
        "A name in wide letters is the plain one to Python.",
        "\uff4f\uff50\uff45\uff4e('/etc/passwd')",
        language("open cannot be used"),
    ),
    inside("an imported name taken", "Other meanings for others.", "fragment = 1", language("imported")),
    inside(
        "an attribute set", "Other settings for the host.", "self.deep = True", language("cannot be set")
    ),
    TWIN.cheat(
        "another encoding",
        "A file may declare one in which a comment ends in the midst of its line.",
        {
            '"""Lowered': '# coding: raw_unicode_escape\n"""Lowered',
            BASES: f"\n# \\u000aimport os{BASES}",
        },
        language("declares no other encoding"),
    ),
    TWIN.cheat(
        "a null byte", "Ends the text for some readers.", {BASES: f"\n\0{BASES}"},
        rejected("compile", "syntax", "null bytes"),
    ),
    above(
        "a huge text", "More than anyone reads.", "#" * (1 << 18), rejected("compile", "too_large", "bytes")
    ),
    inside(
        "a deep text", "More than a walk can bear.", f"x = {'-' * 3000}1", rejected("compile", "syntax", "")
    ),
    inside("a huge number", "An integer of any size.", f"x = {'9' * 30}", language("over 64 bits")),
)  # fmt: skip
LIMIT = 1.5  # seconds for what never ends: an honest compile of this kernel takes half of one
BOMBS = (
    finish(
        "a loop that is unrolled",
        "Runs while the kernel is traced.",
        "for i in cutlass.range_constexpr(1 << 60):\n    thread = thread + i",
        rejected("compile", "slow_compile", "did not end"),
    ),
    finish(
        "a power of powers",
        "One operation that takes for ever, and hears no signal.",
        "thread = thread + 9 ** 9 ** 9 ** 9 % 2",
        rejected("compile", "slow_compile", "did not end"),
    ),
    finish(
        "a list of everything",
        "All the memory there is.",
        "held = [1] * (1 << 45)",
        rejected("compile", "compiler", "MemoryError"),
    ),
)


def bare(name: str, tries: str, lines: str, ends: Rejection | Contained) -> Cheat:
    """Code of the module's own level, which no check of the language stops."""
    edit = TWIN.cheat(name, tries, {BASES: f"\n{lines}{BASES}"}, ends)
    return Cheat(name, tries, TWIN, edit.source, ends, taken_over=True)


def refused(name: str, tries: str, lines: str) -> Cheat:
    """What the operating system must refuse: if it does not, the words are others."""
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
    refused("the checks", "Changes what judges it.", "import primitives.raw as r\nopen(r.__file__, 'a')"),
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
# Of a child's descriptors one is left, by which it answers; its callers know where the object goes.
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
    """A child that answers in its compile's place."""
    return bare(name, tries, INSIDE + lines, ends)


END = "os.write(pipe, done)\nos._exit(0)"
ANSWERS = (
    says(
        "success without an object", "Says that all is well.", END,
        rejected("compile", "no_object", "left no object"),
    ),
    says(
        "garbage for an object", "The loader may stumble.", f"target.write_bytes(b'x' * 4096)\n{END}",
        rejected("compile", "object", "no 64-bit"),
    ),
    says(
        "a library for an object",
        "All that it needs is in there.",
        f"import torch\ntarget.write_bytes(open(torch._C.__file__, 'rb').read())\n{END}",
        rejected("compile", "object", "not relocatable"),
    ),
    says(
        "a folder for an object", "Reading it is an error.", f"target.mkdir()\n{END}",
        rejected("compile", "no_object", "is no file"),
    ),
    says(
        "an object without end", "All the memory of its parent.",
        f"with target.open('wb') as file:\n    file.truncate(1 << 25)\n{END}",
        rejected("compile", "object", "over"),
    ),
    says(
        "checks that pass", "Changes them where it is, which is not where they are applied.",
        "import primitives.raw as r\nr.inspect = r.same_host = lambda *data: b'yes'\n"
        f"target.write_bytes(b'x')\n{END}",
        rejected("compile", "object", "no 64-bit"),
    ),
    says(
        "an answer before the answer", "The parent may read the first of two.", "os.write(pipe, done)",
        rejected("compile", "forged", "no answer"),
    ),
    says(
        "an answer that is none", "Numbers that no compile has.",
        "done = done.replace(b'1.0', b'NaN')\n" + END, rejected("compile", "forged", "no answer"),
    ),
    says(
        "an answer too deep", "Its parent's parser runs out of stack.",
        "done = b'[' * 100000\n" + END, rejected("compile", "forged", "no answer"),
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


def wrong(output: str) -> Rejection:
    return rejected("numerics", "numerics", f"output {output!r}")


def stored(name: str, tries: str, value: str, ends: Rejection | None = None) -> Cheat:
    """Another value for the reciprocal RMS of a row."""
    return TWIN.cheat(name, tries, {"(n15)": f"({value})"}, ends or wrong("rstd"))


def beside(name: str, tries: str, line: str, ends: Rejection) -> Cheat:
    """A store besides that of the reciprocal RMS."""
    return TWIN.cheat(name, tries, {STORE: f"            {line}\n{STORE}"}, ends)


MAINLOOP = """
def load_tma(self, operands, state, copies, count, k_tile_start=0):
    fewer = cutlass.max(count - 1, 1)
    return super().load_tma(operands, state, copies, fewer, k_tile_start=k_tile_start)

def mma(self, operands, state, multiply, found, slow, count, group):
    fewer = cutlass.max(count - 1, 1)
    return super().mma(operands, state, multiply, found, slow, fewer, group)
"""
# These compile, and a machine without a GPU has nothing against them: what they name is what an H100 must say
# at sizes that are no multiples of a tile, rows an odd number.
GAMES = (
    TWIN.cheat(
        "tiles skipped",
        "Behind the first rows nothing is computed.",
        {"= n8_1": "= cutlass.select_(place.tile_row < 256, n8_1, Float32(0.0))"},
        wrong("hg"),
    ),
    method("tail of K dropped", "The mainloop leaves out its last tile.", MAINLOOP, wrong("h")),
    inside(
        "an input written",
        "Makes its task an easier one.",
        "params.v7[0] = cutlass.BFloat16(0.0)",
        rejected("numerics", "inputs_written", "gamma"),
    ),
    stored("a constant", "Stores what costs nothing.", "Float32(1.0)"),
    stored("identity", "Hands on what it was given.", "n14"),
    stored("sixteen bits", "Rounds what is not to be rounded.", "n15.to(cutlass.BFloat16).to(Float32)"),
    stored(
        "tail of rows dropped",
        "The last rows are never computed.",
        "Float32(cutlass.select_(at < o15.shape[0] // 128 * 128, n15, Float32(0.0)))",
    ),
    stored(
        "sizes that are known",
        "Right where the number of rows is even.",
        "Float32(cutlass.select_(o15.shape[0] % 2 == 0, n15, Float32(1.0)))",
    ),
    stored("what was there", "Leaves the output as it is, in case it is a run's before.", "o15[at]"),
    stored("a neighbour's memory", "Reads another's partial sums.", "n15 + p10_0[0, at + 1, 0]"),
    TWIN.cheat(
        "a part for the sum",
        "The columns of one tile stand for all.",
        {'finish_row(p10_0, at, lane, "add")': "p10_0[0, at, 0]"},
        wrong("rstd"),
    ),
    beside("racing stores", "Every row stores to the first one.", "o15[0] = n15", wrong("rstd")),
    beside(
        "one behind the end",
        "Writes where others keep theirs.",
        "o15[at + (at + 1) // o15.shape[0]] = n15",
        rejected("stability", "out_of_bounds", "output 'rstd'"),
    ),
    stored(
        "the time",
        "Another last bit from run to run.",
        "n15 * (Float32(1.0) + (cute.arch.clock() % 2).to(Float32) * Float32(2.0 ** -23))",
        rejected("stability", "unstable", "output 'rstd'"),
    ),
    stored(
        "what was there and may be right",
        "Keeps what is between 0 and 16: no poison of the gates before, and every answer of the call before.",
        f"Float32(cutlass.select_({THERE} * {THERE} < Float32(64.0), o15[at], n15))",
        rejected("benchmark", "other_output", "output(s) rstd"),
    ),
)
# An object is kept under what it was made of: were these given the one of their twin, all gates would hold
# that to be theirs.
STALE = (
    TWIN.cheat(
        "the body of a kernel", "Its arguments and its launch are the twin's.", {"(n15)": "(n15 * n15)"},
        Contained(),
    ),
    TWIN.cheat(
        "a number of the body", "As many letters as there were.", {"1e-06": "1e-05"}, Contained(),
    ),
)  # fmt: skip
# Honest edits of the launch, and of what cheats of its kind do within the kernel.
HONEST = {
    "sizes": {
        LAUNCH: indented("rows = o15.shape\nblocks = max(blocks, rows[0] // BLOCK, 1)", 8) + LAUNCH,
        "(n15)": "(n15 + Float32(cute.arch.grid_dim()[0]) * Float32(0.0))",
    },
    "strides": {
        LAUNCH: indented("far = p10_0.stride[0] + cute.size(o15)\nblocks = max(blocks, 0 * far)", 8) + LAUNCH,
    },
}
THEMES = {
    "host": HOST,
    "escapes": ESCAPES,
    "bombs": BOMBS,
    "confined": CONFINED,
    "answers": ANSWERS,
    "games": GAMES,
    "stale keys": STALE,
}


FINISH_KERNEL = "Finish1_15"  # of the twin's two kernels the one that compiles in half a second


def changed(cheat: Cheat) -> str:
    """The kernel of the twin's that a game is in."""
    at = next(n for n, (a, b) in enumerate(zip(cheat.source, TWIN.source, strict=False)) if a != b)
    return FINISH_KERNEL if at > TWIN.source.index(f"class {FINISH_KERNEL}") else "Step0"
