"""The language of raw modules accepts the text that lowering writes, and honest edits of it. Other texts are
refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from checkout import ROOT

from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.language import MAX_BYTES, _EditChecker, check
from coda_agent.primitives.raw.names import permitted

KERNELS = ROOT / "generated_kernels"
HEADER = """
import cutlass
import cutlass.cute as cute
import math
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from functools import partial
from quack import copy_utils, layout_utils
from quack.epilogue.ops import ColVecLoad, TileStore
from primitives.device.mainloop import FusedGemm, RowPartials, arguments, fragment
"""
STEP = '''
class Step0(FusedGemm):
    _epi_ops = (ColVecLoad("v5"), TileStore("o9"), RowPartials("p2", "add"))
    EpilogueArguments = arguments(_epi_ops)

    @cute.jit
    def epi_visit_subtile(self, params, resources, accumulator, operand=None):
        """Strings in docstrings are __free__."""
        found = fragment(accumulator)
        for i in cutlass.range(cute.size(accumulator) // 2, unroll_full=True):
            found[2 * i] = accumulator[2 * i] * resources["v5"][2 * i]
{body}
        return (found,)
{methods}
'''
FINISH = """
class Finish0:
    @cute.jit
    def __call__(self, p8, o8, stream):
        blocks = cute.ceil_div(o8.shape[0] * 8, 256)
{body}
        launched = self.kernel(p8, o8)
        launched.launch(grid=[blocks, 1, 1], block=[256, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, p8, o8):
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            o8[0] = p8[0].to(o8.element_type)
"""


def indented(text: str, spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in text.strip("\n").splitlines())


def step(body: str = "", methods: str = "") -> str:
    return HEADER + STEP.format(body=indented(body, 8), methods=indented(methods, 4))


def finish(body: str = "") -> str:
    return HEADER + FINISH.format(body=indented(body, 8))


def refused(text: str, wanted: tuple[str, ...] = ()) -> RawError:
    with pytest.raises(RawError) as caught:
        check(text, wanted)
    return caught.value


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cutedsl.py")), ids=lambda p: p.name.partition(".")[0])
def test_what_lowering_writes_passes(path: Path) -> None:
    text = re.sub(r"_[0-9a-f]{12}\b", "", path.read_text(encoding="utf-8"))
    check(text, re.findall(r"^class (\w+)", text, re.M))


HONEST = [
    step(),
    step("if const_expr(self.deep):\n    found[0] = Float32(math.pi)\nelse:\n    pass"),
    step("with cute.arch.elect_one():\n    cute.arch.fence_proxy('async.shared', space='cta')"),
    step("scale = partial(cute.arch.fmax, Float32(0.0))\nfound[1] = scale(found[0])"),
    step("def twice(x):\n    return 2 * x\nfound[1] = twice(found[0])"),
    step("pairs = [(a, b) for a, b in zip((1, 2), (3, 4))]\nassert len(pairs) == 2"),
    step(
        methods="""
epi_c_stage_base = 2
def _compute_stages(self, *sizes, **more):
    stages = super()._compute_stages(*sizes, **more)
    if self.deep:
        return stages[0] + 1, max(stages[1] - 1, 1), stages[2]
    return stages
def epi_begin(self, params, *rest):
    return super().epi_begin(params, *rest)
def helper(self, x: Float32) -> Float32:
    return self._epi_ops[0], x
@cute.jit
def mma(self, *rest):
    return super().mma(*rest)"""
    ),
    step().replace(
        "class Step0",
        """WIDE = 4 * 8
class Sums(RowPartials):
    def fn_sink_flush(self, gemm, state, values):
        for i in cutlass.range_constexpr(WIDE):
            state[i] = self._merge(state[i], values[i])
@cute.jit
def helper(x: Float32, twice: cutlass.Constexpr = False):
    return x
class Step0""",
    ),
    finish("half = min(blocks, 4) // 2"),
    finish("rows, half = 1, 2").replace(
        "rows, half = 1, 2", "rows = o8.shape[0]\n        far = p8.stride[0]"
    ),
    finish("sizes = p8.shape\nrows = sizes[0] + cute.size(o8) + cute.shape(p8)[0] + len(p8.shape)"),
    finish("wide = self.wide + max(*o8.shape, 4)").replace("Finish0:\n", "Finish0:\n    wide = 4\n\n"),
]


@pytest.mark.parametrize("text", HONEST)
def test_honest_edits_pass(text: str) -> None:
    check(text, ["Step0"] if "Step0" in text else ["Finish0"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import os", "os cannot be imported here"),
        ("from os import path", "cannot be imported"),
        ("import cutlass.cute.runtime as runtime", "cannot be imported"),
        ("from cutlass.cute import compile", "'compile' to use"),
        ("from cutlass.cute import runtime", "'runtime' to use"),
        ("from cutlass._mlir.dialects import llvm", "cannot be imported"),
        ("from cutlass import cutlass_dsl", "'cutlass_dsl' to use"),
        ("from quack.epilogue.ops import torch", "'torch' to use"),
        ("from quack.epilogue.ops import inspect", "'inspect' to use"),
        ("from quack.copy_utils import llvm", "'llvm' to use"),
        ("from primitives.device.lanes import llvm", "'llvm' to use"),
        ("from coda_agent.primitives.runtime.compile import subprocess", "cannot be imported"),
        ("from typing import NamedTuple", "'NamedTuple' to use"),
        ("from typing import get_type_hints", "'get_type_hints' to use"),
        ("from functools import reduce", "'reduce' to use"),
        ("from math import *", "'*' to use"),
        ("from . import secrets", "full name"),
        ("import cutlass.pipeline", "as pipeline"),
        ("from __future__ import annotations", "__future__ cannot be imported"),
        ("import math as cute", "imported: choose another name"),
        ("import math as print", "is a name of Python's"),
        ("x = open('/etc/passwd')", "a number, a string"),
        ("x = cute.jit", "is not a number"),
        ("x = [1 for i in (1, 2)]", "a number, a string"),
        ("x = math.sqrt(cute)", "a number, a string"),
        ("x = lambda: 1", "a number, a string"),
        ("print(1)", "move this"),
        ("if True:\n    pass", "move this"),
        ("FusedGemm.kernel = 1", "move this"),
        ("def f(x=fragment):\n    return x", "a number, a string"),
        ("def f(x: 'Float32'):\n    return x", "without quotes"),
        ("def f(x: cute.size(1)):\n    return x", "may not contain a call"),
        ("@partial\ndef f(x):\n    return x", "decorator"),
        ("@cute.kernel\ndef f(x):\n    return x", "@cute.kernel"),
        ("async def f(x):\n    return x", "move this"),
        ("class Sub(FusedGemm, metaclass=FusedGemm):\n    pass", "no keywords"),
        ("class Sub(Float32):\n    pass", "is not a base"),
        ("class Sub(dict):\n    pass", "is not a base"),
        ("@partial\nclass Sub(FusedGemm):\n    pass", "no decorator"),
        ("class Step0(FusedGemm):\n    pass", "once"),
    ],
)
def test_what_stands_outside_functions(line: str, words: str) -> None:
    error = refused(step() + line + "\n", ("Step0",))
    assert words in error.message, error.message
    assert error.code in ("language", "vocabulary", "host", "kernel")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("open('/etc/passwd')", "open cannot be used here"),
        ("eval('1')", "eval cannot be used"),
        ("getattr(self, 'x')", "getattr cannot be used"),
        ("setattr(self, 'x', 1)", "setattr cannot be used"),
        ("type(self)", "type cannot be used"),
        ("globals()", "globals cannot be used"),
        ("input()", "input cannot be used"),
        ("breakpoint()", "breakpoint cannot be used"),
        ("print(1)", "print cannot be used"),
        ("x = super", "super cannot be used"),
        ("super()", "super().method"),
        ("super(FusedGemm, open).x()", "super cannot be used"),
        ("x = undefined", "is unknown here"),
        ("x = self.__class__", "no name holds __"),
        ("x = fragment.__globals__", "no name holds __"),
        ("x = cute.__builtins__", "'__builtins__' to use"),
        ("x = resources['__class__']", "without __"),
        ("x = cute", "cute is a module"),
        ("x = cute.arch", "cannot be passed or stored"),
        ("fragment(cute)", "cute is a module"),
        ("cute.compile(self)", "'compile' to use"),
        ("cute.printf('x')", "'printf' to use"),
        ("cute.core.inspect.os.system('x')", "'core' to use"),
        ("cute.runtime.load_module('x')", "'runtime' to use"),
        ("cute.arch.llvm.inline_asm(1)", "'llvm' to use"),
        ("cute.arch.inline_ptx('x')", "'inline_ptx' to use"),
        ("cute.math.functools.reduce(1)", "'functools' to use"),
        ("copy_utils.cutlass.base_dsl", "'cutlass' to use"),
        ("cpasync.warnings.sys.exit()", "'warnings' to use"),
        ("cute._mlir", "'_mlir' to use"),
        ("cute.jit = 1", "cannot be set"),
        ("cute.arch.fmax = 1", "cannot be set"),
        ("self.deep = True", "cannot be set"),
        ("self.deep += 1", "cannot be set"),
        ("for self.deep in (1, 2):\n    pass", "cannot be set"),
        ("x = [1 for self.deep in (1, 2)]", "cannot be set"),
        ("with cute.arch.elect_one() as self.deep:\n    pass", "cannot be set"),
        ("x = self._stages(1)", "private"),
        ("x = '{0.x}'.format(self)", "leads out"),
        ("x = accumulator[0].ir_value().owner", "leads out"),
        ("x = (i for i in (1, 2)).gi_frame", "leads out"),
        ("x = FusedGemm.mro()", "leads out"),
        ("self.kernel(1).launch(grid=[1, 1, 1])", "leads out"),
        ("try:\n    pass\nfinally:\n    pass", "try cannot be used"),
        ("raise ValueError('x')", "raise cannot be used"),
        ("import os", "an import cannot be used"),
        ("class Inner:\n    pass", "a class cannot be used"),
        ("global x", "global cannot be used"),
        ("del found", "del cannot be used"),
        ("x = (y := 1)", ":= cannot be used"),
        ("x = f'{self}'", "an f-string cannot be used"),
        ("yield 1", "yield cannot be used"),
        ("x = b'abc'", "bytes literal"),
        ("x = 1 << 2; y = 99999999999999999999999999", "64 bits"),
        ("open = 1", "is a name of Python's"),
        ("cute = 1", "imported"),
        ("fragment = 1", "imported"),
        ("x = lambda open: open", "is a name of Python's"),
        ("x = lambda cute: cute", "imported"),
        ("\u0430 = 1", "beyond ASCII"),
        ("[1, 2][0](1)", "by their name"),
    ],
)
def test_what_stands_in_a_function(line: str, words: str) -> None:
    text = step(line)
    error = refused(text, ("Step0",))
    assert words in error.message, error.message
    assert error.line is not None and line.splitlines()[0].strip() in text.splitlines()[error.line - 1]


@pytest.mark.parametrize(
    "method",
    [
        "def __call__(self, a):\n    pass",
        "def __init__(self, a):\n    pass",
        "def __getattr__(self, a):\n    pass",
        "def epi_to_underlying_arguments(self, a):\n    pass",
        "def epi_smem_bytes(self, a):\n    pass",
        "def epi_get_smem_struct(self, a):\n    pass",
        "def _setup_attributes(self, a):\n    pass",
        "def _filter_epi_ops(self, a):\n    pass",
        "def make_tma_load_atoms_and_tensors(self, a):\n    pass",
        "def get_scheduler_arguments(self, a):\n    pass",
        "def mro(self):\n    pass",
        "def kernel(self, a):\n    pass",
        "@cute.kernel\ndef mma(self, a):\n    pass",
        "@staticmethod\ndef mma(a):\n    pass",
        "_setup_attributes = fragment",
        'epi_to_underlying_arguments = arguments((RowPartials("p2", "add"),))',
        "epi_to_underlying_arguments = Float32",
        "epi_to_underlying_arguments = 1",
        "epi_to_underlying_arguments: int = 1",
        "mma = 1",
        "EpilogueParams = arguments(())",
        "epi_c_stage_base = Float32",
        "host_new = 1",
        "def _compute_stages(self, *sizes, **more):\n    return sizes[6].p2[0]",
        "def _compute_stages(self, *sizes, **more):\n    a, b = sizes[6].p2\n    return a",
        "def _compute_stages(self, sizes):\n    return max(sizes)",
        "def _compute_stages(self, *sizes, **more):\n    return self.__class__",
        "epi_smem_bytes = lambda a: a",
        "epi_tile = FusedGemm.epi_tile",
        'found = (TileStore("o1", epi_tile_fn=fragment),)',
        'found = fragment("o1")',
        "def _compute_stages(self, *sizes, **more):\n    sizes[6].x[0] = 1\n    return 4, 2, 2",
        "def _compute_stages(self, *sizes, **more):\n    cute.make_ptr(Float32, 0)\n    return 4, 2, 2",
        "def _compute_stages(self, *sizes, **more):\n    return self.epi_begin(1)",
        "def _compute_stages(self, *sizes, **more):\n    return fragment(sizes[0])",
        "def _compute_stages(self, *sizes, **more):\n    for i in sizes:\n        pass",
    ],
)
def test_what_the_host_runs_is_not_written(method: str) -> None:
    error = refused(step(methods=method), ("Step0",))
    assert error.code in ("host", "language"), error.message


@pytest.mark.parametrize("method", ["to_params", "host_fake_arg", "smem_bytes", "param_fields", "host_new"])
def test_a_resource_keeps_its_host_side(method: str) -> None:
    resource = f"class Mine(ColVecLoad):\n    def {method}(self, gemm, args):\n        return args\n"
    assert refused(step() + resource).code == "host"


@pytest.mark.parametrize(
    "body",
    [
        "cute.make_tensor(1, 2)[0] = 1",
        "p = cute.make_ptr(Float32, 4096)",
        "o8[0] = 1.0",
        "x = p8.iterator.store(1)",
        "x = self.other(p8)",
        "for i in (1, 2):\n    pass",
        "launched = self.kernel(p8, o8)",
        "x = o8[0]",
        "x = o8[-1000]",
        "x = o8[1 << 40]",
        "x = o8.shape + o8[0]",
        "x = max(o8)",
        "x = min(*o8, 1)",
        "x = (o8, p8)",
        "x = 1 if o8 > 3 else 0",
        "x = o8.shape[o8[0]]",
        "x = o8.iterator + 1",
        "x = o8.shape.x",
        "x = o8.element_type.width",
        "x = cute.ceil_div(o8, 4)",
        "x = stream + 1",
    ],
)
def test_a_launch_holds_sizes_alone(body: str) -> None:
    error = refused(finish(body), ("Finish0",))
    assert error.code == "host" and error.line is not None, error.message
    assert body.splitlines()[0] in finish(body).splitlines()[error.line - 1]


@pytest.mark.parametrize("given", ["me, self, o8", "*self, o8", "*, self, o8", "o8, *self", "o8, **self"])
def test_self_in_another_place_is_a_tensor(given: str) -> None:
    text = finish("x = self[0]").replace("__call__(self, p8, o8, stream)", f"__call__({given})")
    assert "self on the host" in refused(text, ("Finish0",)).message
    text = finish("x = self.iterator").replace("__call__(self, p8, o8, stream)", f"__call__({given})")
    assert ".iterator on the host" in refused(text, ("Finish0",)).message


@pytest.mark.parametrize(
    ("value", "words"),
    [("self.__class__", "no name holds __"), ("self._mine", "private"), ("self.func", "leads out")],
)
def test_no_attribute_leads_out_of_a_launch(value: str, words: str) -> None:
    assert words in refused(finish(f"x = {value}"), ("Finish0",)).message


def test_a_class_of_the_modules_own_is_no_way_to_the_hosts_methods() -> None:
    between = step().replace("Step0", "Between")
    for line in ("def epi_to_underlying_arguments(self, a):\n        return a", "epi_smem_bytes = 1"):
        text = between + f"\nclass Step0(Between):\n    {line}\n"
        assert refused(text, ("Step0",)).code == "host"
    check(between + "\nclass Step0(Between):\n    epi_c_stage_base = 2\n", ["Step0"])


def test_a_class_has_no_type_parameters() -> None:
    tree = ast.parse(step())
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef))
    node.type_params = [ast.Name("T", ast.Load())]  # type: ignore[attr-defined,unused-ignore]
    with pytest.raises(RawError, match="one base at most"):
        _EditChecker(tree).module(frozenset({"Step0"}))


@pytest.mark.parametrize(
    "name",
    [
        *("print_tensor", "printf", "print_nd_vector", "inline_ptx", "dsl_user_op", "mangle", "ParamsBase"),
        *("make_fake_tensor", "register_jit_arg_adapter"),
    ],
)
def test_what_a_listed_module_may_come_to_offer_is_not_permitted(name: str) -> None:
    """A later CuTeDSL might define these names in a module that edits may import. Edits still may not use
    them."""
    module = ModuleType("cutlass.cute")
    for offered in (name, "make_layout"):
        found = FunctionType((lambda: None).__code__, {}, offered)
        found.__module__ = "cutlass.cute.core"
        setattr(module, offered, found)
    assert permitted(module, "make_layout") and not permitted(module, name)


def test_a_launch_is_the_given_one() -> None:
    text = finish()
    for old, new in (
        ("self.kernel(p8, o8)", "self.kernel(p8, o8[0])"),
        ("stream=stream", "stream=blocks"),
        ("block=[256, 1, 1]", "block=fragment(1)"),
        ("    @cute.jit\n", ""),
    ):
        assert old in text
        assert refused(text.replace(old, new), ("Finish0",)).code in ("host", "language")


def test_sizes_names_and_garbage() -> None:
    assert refused("#" * (MAX_BYTES + 1)).code == "too_large"
    assert refused("def f(:\n").code == "syntax"
    assert refused("\0").code == "syntax"
    assert refused("x = " + "(" * 300 + "1" + ")" * 300).code == "syntax"
    assert refused("x = " + "-" * 3000 + "1").code == "syntax"
    missing = refused(step(), ("Step0", "Step1"))
    assert missing.code == "kernel" and "Step1" in missing.message
    check(step(), ())
