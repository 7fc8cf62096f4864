"""The language of raw modules: the part of Python that writes a kernel, checked on the syntax tree before the
module runs.

The check gives authors errors with a line and a remedy, and stands in front of the walls that the operating
system gives (``primitives.raw.confine``): names come from listed modules, nothing is set on objects, no
attribute leads out of a value, and what is traced for the host, where a compiled kernel has the powers of the
process that launches it, is not an author's to write. Raises RawError.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import tokenize
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from primitives.raw.error import RawError

MAX_BYTES = 128 << 10
MAX_INTEGER = 1 << 64


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Whose public names may be used: those that a module defines itself, or that come from these.
_NUMBERS = ("cutlass.base_dsl.typing", "cutlass.cutlass_dsl", "cutlass.base_dsl.arch")
_CUTE = tuple(
    f"cutlass.cute.{name}" for name in ("core", "tensor", "tuple", "algorithm", "atom", "math", "typing")
)
MODULES: dict[str, tuple[str, ...]] = {
    "cutlass": (),
    "cutlass.cute": (*_CUTE, *_NUMBERS),
    "cutlass.cute.arch": ("cutlass.cute.arch",),
    "cutlass.cute.math": ("cutlass._mlir_helpers.math",),
    "cutlass.cute.nvgpu": ("cutlass.cute.nvgpu",),
    "cutlass.cute.nvgpu.cpasync": ("cutlass.cute.nvgpu",),
    "cutlass.cute.nvgpu.warp": ("cutlass.cute.nvgpu",),
    "cutlass.cute.nvgpu.warpgroup": ("cutlass.cute.nvgpu",),
    "cutlass.pipeline": ("cutlass.pipeline",),
    "cutlass.utils": (),
    "cutlass.utils.hopper_helpers": (),
    "math": (),
    "quack.activation": (),
    "quack.copy_utils": (),
    "quack.epilogue.mixin": (),
    "quack.epilogue.ops": (),
    "quack.fast_math": (),
    "quack.gemm_sm90": (),
    "quack.layout_utils": (),
    "quack.rounding": (),
    "quack.sm90_utils": (),
    "primitives.device.finish": (),
    "primitives.device.heads": (),
    "primitives.device.lanes": (),
    "primitives.device.mainloop": (),
    "primitives.device.tables": (),
    "primitives.device.values": ("quack.activation",),
}
# What else these offer compiles, prints, loads libraries, or reaches the compiler's insides.
CHOSEN = {
    "cutlass": _names(
        "AddressSpace BFloat16 Boolean Constexpr Float16 Float32 Float64 Float8E4M3FN Float8E5M2 Int16 Int32 "
        "Int4 Int64 Int8 Numeric TFloat32 Uint16 Uint32 Uint64 Uint8 all_ and_ any_ const_expr dynamic_expr "
        "max min not_ or_ range range_constexpr select_ cute pipeline utils"
    ),
    "cutlass.utils": frozenset({"SmemAllocator"}),
    "functools": frozenset({"partial"}),
    "typing": frozenset({"Any", "Callable", "Literal", "Optional", "Tuple", "Type", "Union"}),
}
DENIED = _names(
    "print_tensor printf print_nd_vector inline_ptx dsl_user_op mangle ParamsBase make_fake_tensor "
    "register_jit_arg_adapter"
)
ALSO = {"cutlass.cute": frozenset({"AddressSpace", "ReductionOp", "jit", "kernel"})}

BUILTINS = _names(
    "abs all any bool dict enumerate float int isinstance len list max min range reversed round sorted sum "
    "tuple zip slice"
)
# Where an object leads to its interpreter, its compiler or another function's insides.
_BANNED = _names(
    "mro format format_map func launch compile compile_to export_to_c ir_value value owner operation context "
    "location jit_engine"
)
_BANNED_PREFIXES = ("gi_", "cr_", "ag_", "f_", "tb_", "co_", "func_", "host_")

# Traced within the kernel: found by watching which methods a compile calls from inside it and which from
# the host's side of the launch.
STEP_METHODS = _names(
    "kernel load_tma mma epilogue epi_begin epi_begin_loop epi_end epi_end_loop epi_get_smem_tensors "
    "epi_load_acc_subtile epi_prepass_end epi_prepass_subtile epi_r2s_pair_xor epi_retile_acc "
    "epi_setup_aux_out epi_tile_load_g2s_copy_fns epi_tile_load_s2r epi_visit_acc epi_visit_subtile "
    "epilog_gmem_copy_and_partition epilog_smem_copy_atom epilog_smem_load_and_partition "
    "epilog_smem_store_and_partition make_ab_pipeline make_epi_pipeline make_epi_store_pipeline "
    "make_sched_pipeline pingpong_barrier_arrive pingpong_barrier_sync"
)
STAGES = "_compute_stages"  # on the host, in arithmetic
RESOURCE_METHODS = _names(
    "begin begin_loop end end_loop_finish end_loop_stage fn_apply fn_prepare fn_prepass_end "
    "fn_prepass_resolve fn_sink_flush get_smem_tensor load_g2s_copy_fn load_s2r needs_async_fence "
    "prepass_resolve_needed stat_value stats_begin stats_slice store_convert store_r2s store_setup "
    "_broadcast_stride _combine_op _coord_idx _end_loop_smem _end_loop_values _finalize _fold _fold_identity "
    "_get_gmem_vec _guard_neg_inf _mask_oob_active _merge _select_packed16"
)
_SETTINGS = frozenset({"_epi_ops"})  # names with an underscore that a class may give a value

_PLAIN = (
    ast.Expr, ast.Return, ast.Pass, ast.Break, ast.Continue, ast.If, ast.For, ast.While, ast.Assign,
    ast.Assert, ast.AugAssign, ast.With, ast.withitem, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Dict, ast.Tuple, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.Subscript, ast.Slice, ast.Starred, ast.Lambda, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_REMEDIES: dict[type[ast.AST], tuple[str, str]] = {
    ast.Import: ("an import", "imports stand at the top of the module"),
    ast.ImportFrom: ("an import", "imports stand at the top of the module"),
    ast.ClassDef: ("a class", "classes stand at the top level of the module"),
    ast.Try: ("try", "an error ends the compile and is shown to you with its line"),
    ast.Raise: ("raise", "write assert with a condition"),
    ast.Global: ("global", "pass the value as an argument"),
    ast.Nonlocal: ("nonlocal", "return the value"),
    ast.Delete: ("del", "leave the name alone"),
    ast.NamedExpr: (":=", "assign on a line of its own"),
    ast.JoinedStr: ("an f-string", "write the text out"),
    ast.Yield: ("yield", "return a tuple"),
    ast.Await: ("await", "nothing waits in a kernel"),
    ast.Match: ("match", "write if and elif"),
    ast.AnnAssign: ("an annotated assignment", "write name = value"),
}


def check(text: str, wanted: Collection[str]) -> None:
    """``wanted``: the classes that the module must define.

    RawError: ``too_large``, ``syntax``, ``language``, ``vocabulary``, ``host`` or ``kernel``, the line, and
    words that say what would work.
    """
    checker = _Checker(_parse(text))
    try:
        checker.module(frozenset(wanted))
    except RecursionError:
        raise RawError("syntax", "nested too deep: name the parts", checker.line) from None


def _parse(text: str) -> ast.Module:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise RawError("too_large", f"the module has {size} bytes of at most {MAX_BYTES}: shorten it")
    try:
        data = text.encode()
        # The import heeds a declared encoding, in which a comment may be code; a reader sees the comment.
        if tokenize.detect_encoding(io.BytesIO(data).readline)[0] not in ("utf-8", "utf-8-sig"):
            raise RawError("language", "the text is UTF-8: it declares no other encoding", 1)
        return ast.parse(data)
    except SyntaxError as error:
        raise RawError("syntax", f"syntax error: {error.msg}", error.lineno) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise RawError("syntax", f"not text that Python reads: {error}") from None


def permitted(module: ModuleType, name: str) -> bool:
    """Whether a module of the list may be asked for ``name``."""
    home = module.__name__
    if name.startswith("_") or name in DENIED or not hasattr(module, name):
        return False
    if home in CHOSEN:
        return name in CHOSEN[home]
    found = getattr(module, name)
    if name in ALSO.get(home, ()):
        return True
    if isinstance(found, ModuleType):
        return found.__name__ in MODULES and found.__name__.startswith(home)
    if isinstance(found, int | float | str):
        return True
    while isinstance(found, partial):
        found = found.func
    origin = getattr(found, "__module__", None) or ""
    return origin == home or any((origin + ".").startswith(o + ".") for o in MODULES[home])


class _Checker:
    """One walk over a module; ``line`` is that of the last node that has one."""

    def __init__(self, tree: ast.Module):
        self._tree = tree
        self.line: int | None = None
        self._modules: dict[str, ModuleType] = {}  # by the name that the module gives it
        self._imported: dict[str, Any] = {}
        self._constants: set[str] = set()
        self._classes: dict[str, type | None] = {}  # its nearest imported base
        self._bound = set(_bindings(tree))
        self._method = False  # whether the node lies in one, where super() means something
        self._visitors: dict[type[ast.AST], Callable[..., None]] = {
            ast.FunctionDef: self._function,
            ast.arguments: self._parameters,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.keyword: self._keyword,
            ast.Constant: self._constant,
        }

    def _refuse(self, message: str, code: str = "language") -> NoReturn:
        raise RawError(code, message, self.line)

    def _at(self, node: ast.AST) -> None:
        self.line = getattr(node, "lineno", self.line)

    # The module

    def module(self, wanted: frozenset[str]) -> None:
        for index, statement in enumerate(self._tree.body):
            self._at(statement)
            match statement:
                case ast.Import() | ast.ImportFrom():
                    self._import(statement)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._binding(name)
                    self._simple(value)
                    self._constants.add(name)
                case ast.FunctionDef():
                    self._function(statement)
                case ast.ClassDef():
                    self._class(statement)
                case ast.Expr(value=ast.Constant(value=str())) if index == 0:
                    pass
                case _:
                    self._refuse(
                        "beside its docstring a module holds imports, constants, functions and classes: move "
                        "this into one of them"
                    )
        self._defines(wanted)

    def _defines(self, wanted: frozenset[str]) -> None:
        counts = Counter(_module_names(self._tree))
        self.line = None
        for name in sorted(wanted):
            if counts[name] != 1 or name not in self._classes:
                self._refuse(f"the module must define the class {name} once, as the given one does", "kernel")
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            self._refuse(f"{', '.join(sorted(twice))}: a name of the module is given once")

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.ImportFrom):
                if node.level or node.module is None:
                    self._refuse("imports name their module in full")
                full = f"{node.module}.{alias.name}"
                found = self._listed(full) if full in MODULES else self._member(node.module, alias.name)
            else:
                found = self._listed(alias.name)
                if "." in name:
                    self._refuse(f"write: import {alias.name} as {name.rpartition('.')[2]}")
            self._binding(name)
            (self._modules if isinstance(found, ModuleType) else self._imported)[name] = found

    def _listed(self, name: str) -> ModuleType:
        if name not in MODULES and name not in CHOSEN:
            known = ", ".join(sorted({*MODULES, *CHOSEN}))
            self._refuse(f"{name} cannot be imported here; there are {known}", "vocabulary")
        return importlib.import_module(name)

    def _member(self, module: ModuleType | str, name: str) -> Any:
        module = self._listed(module) if isinstance(module, str) else module
        if not permitted(module, name):
            near = [n for n in dir(module) if permitted(module, n)]
            said = f"; it has {', '.join(near)}" if len(near) <= 60 else ""
            self._refuse(f"{module.__name__} has no {name!r} to use here{said}", "vocabulary")
        return getattr(module, name)

    def _simple(self, node: ast.expr) -> None:
        """A value known when the module is read: it refers to no function, so that none can be renamed."""
        self._at(node)
        match node:
            case ast.Constant():
                self._constant(node)
            case ast.Name(id=name) if name in self._constants:
                pass
            case ast.Name(id=name) if isinstance(self._imported.get(name), int | float | str):
                pass
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._simple(part)
            case ast.BinOp(left=left, op=op, right=right) if not isinstance(op, ast.Pow | ast.LShift):
                self._simple(left)
                self._simple(right)
            case ast.BinOp(left=ast.Constant(), right=ast.Constant(value=int(power))) if power <= 64:
                self._simple(node.left)
            case ast.UnaryOp(operand=operand):
                self._simple(operand)
            case ast.Attribute(value=ast.Name(id=name)) if name in self._modules:
                if not isinstance(self._chain(node), int | float):
                    self._refuse(f"{ast.unparse(node)} is no number: use it where it is needed")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=parts, keywords=[]):
                if name not in self._modules or self._modules[name].__name__ != "math":
                    self._refuse("outside functions only math's are called")
                self._chain(node.func)
                for part in parts:
                    self._simple(part)
            case _:
                self._refuse("outside functions a value is a number, a string or a tuple of those")

    # Classes

    def _class(self, node: ast.ClassDef) -> None:
        self._binding(node.name)
        if node.keywords or getattr(node, "type_params", None) or node.decorator_list or len(node.bases) > 1:
            self._refuse("a class has one base at most, no keywords and no decorator")
        base = self._base(node.bases[0]) if node.bases else None
        self._classes[node.name] = base
        local = set(self._constants)
        for statement in node.body:
            self._at(statement)
            match statement:
                case ast.FunctionDef(name=name):
                    self._overridable(name, base)
                    self._member_function(statement, base)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if name not in _SETTINGS:
                        self._identifier(name)
                    self._setting(value)
                    self._constants.add(name)
                case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                    pass
                case _:
                    self._refuse("a class holds methods, and values given by name = value")
        self._constants = local

    def _base(self, node: ast.expr) -> type | None:
        from quack.epilogue.ops import EpiOp

        from primitives.device.mainloop import FusedGemm

        if not isinstance(node, ast.Name):
            self._refuse("a base is named as it is imported")
        if node.id in self._classes:
            return self._classes[node.id]
        found = self._imported.get(node.id)
        if not isinstance(found, type) or not issubclass(found, FusedGemm | EpiOp):
            self._refuse(
                f"{node.id} is no base: a step is a FusedGemm or TableGemm, a resource one of "
                "quack.epilogue.ops or primitives.device"
            )
        return found

    def _overridable(self, name: str, base: type | None) -> None:
        from primitives.device.mainloop import FusedGemm

        if base is None or not hasattr(base, name):
            if name != "__call__" or base is not None:
                self._identifier(name)
            if name.startswith("host_"):
                self._refuse(f"{name}: what the host looks for is not an author's to write", "host")
            return
        step = issubclass(base, FusedGemm)
        known = STEP_METHODS | {STAGES} if step else RESOURCE_METHODS
        if name not in known:
            self._refuse(
                f"{name} runs on the host when a kernel is launched or compiled, and is not an author's to "
                f"write; of {base.__name__} these are: {', '.join(sorted(known))}",
                "host",
            )

    def _member_function(self, node: ast.FunctionDef, base: type | None) -> None:
        decorator = self._decorator(node)
        if node.name == "__call__":
            if decorator != "jit":
                self._refuse("__call__ is decorated with @cute.jit", "host")
            self._launch(node)
        elif node.name == STAGES and base is not None:
            self._stages(node)
        elif (decorator == "kernel") != (node.name == "kernel"):
            self._refuse("the method kernel, and no other, is decorated with @cute.kernel", "host")
        else:
            self._method = True
            self._function(node)
            self._method = False

    def _setting(self, node: ast.expr) -> None:
        """A value in a class: simple, or resources and the arguments they make."""
        self._at(node)
        match node:
            case ast.Tuple(elts=parts) if any(isinstance(p, ast.Call) for p in parts):
                for part in parts:
                    self._setting(part)
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=keywords):
                if not self._makes_resources(name):
                    self._refuse(f"{name} makes no resource: a class calls resources and arguments() only")
                for part in [*parts, *(k.value for k in keywords)]:
                    self._setting(part)
            case ast.Name(id=name) if self._is_number_type(name):
                pass
            case _:
                self._simple(node)

    def _makes_resources(self, name: str) -> bool:
        from quack.epilogue.ops import EpiOp

        from primitives.device.mainloop import arguments

        found = self._classes.get(name, self._imported.get(name))
        return found is arguments or isinstance(found, type) and issubclass(found, EpiOp)

    def _is_number_type(self, name: str) -> bool:
        import cutlass

        found = self._imported.get(name)
        return isinstance(found, type) and issubclass(found, cutlass.Numeric)

    # What runs on the host: arithmetic

    def _launch(self, node: ast.FunctionDef) -> None:
        """A vector kernel's ``__call__``: sizes, then the one launch."""
        names = self._plain_parameters(node)
        body = [s for s in node.body if not _is_docstring(s)]
        for statement in body[:-2]:
            self._at(statement)
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._binding(name)
                    self._arithmetic(value)
                case _:
                    self._refuse_launch()
        if len(body) < 2:
            self._refuse_launch()
        self._at(body[-2])
        match body[-2:]:
            case [
                ast.Assign(
                    targets=[ast.Name(id=held)],
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id="self"), attr="kernel"), args=given, keywords=[]
                    ),
                ),
                ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id=launched), attr="launch"), args=[], keywords=how
                    )
                ),
            ] if held == launched and all(isinstance(g, ast.Name) and g.id in names for g in given):
                self._binding(held)
            case _:
                self._refuse_launch()
        for keyword in how:
            match keyword:
                case ast.keyword(arg="grid" | "block" | "cluster", value=ast.List(elts=parts)):
                    for part in parts:
                        self._arithmetic(part)
                case ast.keyword(arg="stream", value=ast.Name(id="stream")):
                    pass
                case ast.keyword(arg="smem" | "min_blocks_per_mp", value=value):
                    self._arithmetic(value)
                case ast.keyword(arg="use_pdl", value=ast.Constant(value=bool())):
                    pass
                case _:
                    self._refuse_launch()

    def _refuse_launch(self) -> NoReturn:
        self._refuse(
            "__call__ runs on the host: it holds sizes (name = arithmetic) and then, as in the given text, "
            "launched = self.kernel(...) of its own parameters and launched.launch(grid=[...], block=[...], "
            "stream=stream), with smem, cluster, min_blocks_per_mp and use_pdl if need be: the rest belongs "
            "into kernel",
            "host",
        )

    def _plain_parameters(self, node: ast.FunctionDef) -> set[str]:
        given = node.args
        self._parameters(given)
        return {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}

    def _stages(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            self._refuse(f"{STAGES} has no decorator", "host")
        self._plain_parameters(node)
        for statement in node.body:
            self._stage_statement(statement)

    def _stage_statement(self, statement: ast.stmt) -> None:
        self._at(statement)
        match statement:
            case ast.Expr() | ast.Pass() if _is_docstring(statement) or isinstance(statement, ast.Pass):
                pass
            case ast.Assign(targets=[target], value=value):
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if not isinstance(part, ast.Name):
                        self._refuse(f"{STAGES} runs on the host: it assigns to names", "host")
                    self._binding(part.id)
                self._arithmetic(value)
            case ast.If(test=test, body=body, orelse=orelse):
                self._arithmetic(test)
                for inner in [*body, *orelse]:
                    self._stage_statement(inner)
            case ast.Return(value=ast.expr() as value):
                self._arithmetic(value)
            case _:
                self._refuse(f"{STAGES} runs on the host: it assigns, chooses with if, and returns", "host")

    def _arithmetic(self, node: ast.expr) -> None:
        """An expression of the host's: numbers and shapes."""
        self._at(node)
        match node:
            case ast.Constant(value=int() | float() | None):
                self._constant(node)
            case ast.Name():
                self._name(node)
            case ast.Attribute(value=ast.Name(id=name)) if name in self._modules:
                self._refuse(f"{ast.unparse(node)} on the host: it computes sizes only", "host")
            case ast.Attribute(value=inner):
                self._value_attribute(node)
                self._arithmetic(inner)
            case ast.Subscript(value=inner, slice=index):
                self._arithmetic(inner)
                self._arithmetic(index)
            case ast.Slice(lower=lower, upper=upper, step=step):
                for part in filter(None, (lower, upper, step)):
                    self._arithmetic(part)
            case ast.Call(func=called, args=parts, keywords=keywords):
                if not self._counts(called):
                    self._refuse(
                        f"{ast.unparse(called)} on the host: it calls min, max, len, cute.size, cute.shape, "
                        f"cute.ceil_div and super().{STAGES} only",
                        "host",
                    )
                for part in [*parts, *(k.value for k in keywords)]:
                    self._arithmetic(part)
            case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp():
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._arithmetic(child)
            case ast.Tuple(elts=parts):
                for part in parts:
                    self._arithmetic(part)
            case ast.Starred(value=inner):
                self._arithmetic(inner)
            case _:
                self._refuse("on the host there is arithmetic of sizes only", "host")

    def _counts(self, called: ast.expr) -> bool:
        match called:
            case ast.Name(id="min" | "max" | "len"):
                return True
            case ast.Attribute(value=inner, attr=name) if _is_super(inner):
                return name == STAGES
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._modules:
                known = {"cutlass.cute": {"size", "shape", "ceil_div"}, "cutlass": {"min", "max"}}
                return attribute in known.get(self._modules[name].__name__, ())
        return False

    # Functions

    def _visit(self, node: ast.AST) -> None:
        self._at(node)
        visitor = self._visitors.get(type(node))
        if visitor is not None:
            visitor(node)
        elif isinstance(node, _PLAIN):
            for child in ast.iter_child_nodes(node):
                self._visit(child)
        else:
            unknown = (type(node).__name__, "it is not in the language of raw modules")
            said, remedy = _REMEDIES.get(type(node), unknown)
            self._refuse(f"{said} cannot be used here: {remedy}")

    def _function(self, node: ast.FunctionDef) -> None:
        if getattr(node, "type_params", None):
            self._refuse("a function has no type parameters here")
        self._binding(node.name)
        if self._decorator(node) == "kernel" and not (self._method and node.name == "kernel"):
            self._refuse("the method kernel, and no other, is decorated with @cute.kernel", "host")
        self._parameters(node.args)
        self._annotation(node.returns)
        for statement in node.body:
            if not _is_docstring(statement):
                self._visit(statement)

    def _decorator(self, node: ast.FunctionDef) -> str | None:
        """The one it may have: ``jit`` or ``kernel``, of cute."""
        match node.decorator_list:
            case []:
                return None
            case [ast.Attribute(value=ast.Name(id=name), attr="jit" | "kernel" as how)]:
                if name in self._modules and self._modules[name].__name__ == "cutlass.cute":
                    return how
        self._refuse("a function has one decorator at most, @cute.jit or, of the method kernel, @cute.kernel")

    def _parameters(self, node: ast.arguments) -> None:
        for a in (*node.posonlyargs, *node.args, *node.kwonlyargs, node.vararg, node.kwarg):
            if a is not None:
                self._at(a)
                self._binding(a.arg)
                self._annotation(a.annotation)
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self._simple(default)

    def _annotation(self, node: ast.expr | None) -> None:
        if node is None:
            return
        self._at(node)
        if any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node)):
            self._refuse("an annotation is written without quotes")
        if any(isinstance(n, ast.Call) for n in ast.walk(node)):
            self._refuse("an annotation calls nothing")
        self._visit(node)

    def _name(self, node: ast.Name) -> None:
        name = node.id
        if not isinstance(node.ctx, ast.Load):
            self._binding(name)
            return
        self._identifier(name)
        if name in self._modules:
            self._refuse(f"{name} is a module: write {name}.something, it cannot be passed or stored")
        if name not in self._bound and name not in self._imported and name not in BUILTINS:
            if hasattr(builtins, name):
                known = ", ".join(sorted(BUILTINS))
                self._refuse(f"{name} cannot be used here; of Python's own there are {known}")
            self._refuse(f"nothing is named {name!r} here")

    def _binding(self, name: str) -> None:
        self._identifier(name)
        if hasattr(builtins, name):
            self._refuse(f"{name!r} is Python's own: take another name")
        if name in self._modules or name in self._imported:
            self._refuse(f"{name!r} is imported: take another name")

    def _identifier(self, name: str) -> None:
        if not name.isascii():
            self._refuse(f"{name!a} has letters beyond ASCII, which can look like others: spell it out")
        if "__" in name:
            self._refuse(f"{name!r}: no name holds __ here")

    def _attribute(self, node: ast.Attribute) -> None:
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id in self._modules:
            self._chain(node)
        else:
            self._value_attribute(node)
            if not _is_super(node.value):
                self._visit(node.value)
            elif not self._method:
                self._refuse("super() is for methods")

    def _value_attribute(self, node: ast.Attribute) -> None:
        """An attribute of a value, which is read only."""
        self._at(node)
        name = node.attr
        self._identifier(name)
        if not isinstance(node.ctx, ast.Load):
            self._refuse(f".{name} cannot be set: keep the value in a name, or write into a fragment")
        if name in _BANNED or name.startswith(_BANNED_PREFIXES):
            self._refuse(f".{name} leads out of the kernel's values: there is no use for it here")
        if name.startswith("_") and name not in _SETTINGS | RESOURCE_METHODS | {STAGES}:
            self._refuse(f".{name} is private to what it belongs to: use public names, for own methods too")

    def _chain(self, node: ast.expr) -> Any:
        """The object that a dotted name, which begins with a module, stands for; None past a value."""
        names: list[ast.Attribute] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node)
            node = node.value
        assert isinstance(node, ast.Name)
        found: Any = self._modules[node.id]
        for part in names:
            if isinstance(found, ModuleType):
                if not isinstance(part.ctx, ast.Load):
                    self._refuse(f".{part.attr} cannot be set: a module is read only")
                found = self._member(found, part.attr)
            else:
                self._value_attribute(part)
                found = None
        if isinstance(found, ModuleType):
            self._refuse(f"{ast.unparse(names[-1])} is a module: it cannot be passed or stored")
        return found

    def _call(self, node: ast.Call) -> None:
        if _is_super(node):
            self._refuse("super() is for calling a method: super().method(...)")
        if not isinstance(node.func, ast.Name | ast.Attribute | ast.Call):
            self._refuse("call functions by their name")
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _keyword(self, node: ast.keyword) -> None:
        if node.arg is not None:
            self._identifier(node.arg)
        self._visit(node.value)

    def _constant(self, node: ast.Constant) -> None:
        self._at(node)
        match node.value:
            case str(text):
                if "__" in text or len(text) > 200:
                    self._refuse("a string is a short name, without __")
            case int(value) if abs(value) > MAX_INTEGER:
                self._refuse("an integer over 64 bits: no register holds it")
            case bytes() | complex():
                self._refuse(f"a {type(node.value).__name__} literal cannot be used here")


def _is_super(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
            return True
    return False


def _is_docstring(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Every name the module binds; imports aside."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def _module_names(tree: ast.Module) -> Iterator[str]:
    """What the module's own level binds, once for each place."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield alias.asname or alias.name
