"""Edits that the language check of edited texts refuses, and edits whose compile would never end."""

from __future__ import annotations

from cheats.corpus import Rejection, rejected
from cheats.raw.twin import BASES, LAUNCH, STEP, TWIN, above, finish, indented, inside, launch, method


def language(says: str) -> Rejection:
    return rejected("compile", "language", says)


def vocabulary(says: str) -> Rejection:
    return rejected("compile", "vocabulary", says)


def host(says: str) -> Rejection:
    return rejected("compile", "host", says)


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
        language("may not contain a call"),
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
        {"stream=stream,": "stream=0,"},
        host("move the rest to kernel"),
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
        host("the host reads this name"),
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
        host("the host reads this name"),
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
LIMIT = 1.5  # seconds for a compile that never ends; an honest compile of this kernel takes half a second
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
