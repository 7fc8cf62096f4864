"""Check the syntax tree of an edited module, before the module runs. The module may use only a subset of
Python.

The check gives authors errors with a line and a remedy. If the check misses something, confinement
(``primitives.raw.confine``) still protects the machine. There are three rules: a module may import names from
listed modules only; it may read attributes, but not set them; no attribute may lead from a value to the
value's internals. The host code of a compiled kernel (which runs on the CPU) has all rights of the launching
process. So authors may write only arithmetic in host code. Violations raise RawError.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import NoReturn

from coda_agent.primitives.frozen_names import device
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.names import GIVEN, MODULES, RESOURCE_METHODS, SETTINGS, STAGES, STEP_METHODS
from coda_agent.primitives.raw.reader import Reader, is_docstring, is_super

MAX_BYTES = 128 << 10


def check(text: str, wanted: Collection[str]) -> None:
    """Check a module. ``wanted``: the classes that the module must define.

    Raises RawError with a code (``too_large``, ``syntax``, ``language``, ``vocabulary``, ``host`` or
    ``kernel``), the line, and a message with the remedy.
    """
    checker = _EditChecker(_parse(text))
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
        # Refuse encodings other than UTF-8. Python obeys an encoding declaration, and a text that looks like
        # a comment in UTF-8 may be code in another encoding.
        if tokenize.detect_encoding(io.BytesIO(data).readline)[0] not in ("utf-8", "utf-8-sig"):
            raise RawError("language", "the text is UTF-8: it declares no other encoding", 1)
        return ast.parse(data)
    except SyntaxError as error:
        raise RawError("syntax", f"syntax error: {error.msg}", error.lineno) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise RawError("syntax", f"not text that Python reads: {error}") from None


class _EditChecker(Reader):
    """Checks a module and its classes. Host code may contain only arithmetic and a launch."""

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
                        "a module holds only a docstring, imports, constants, functions and classes: move "
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
            self._refuse(f"{', '.join(sorted(twice))}: define each name of the module once")

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.ImportFrom):
                if node.level or node.module is None:
                    self._refuse("write the module's full name in an import")
                full = f"{node.module}.{alias.name}"
                found = self._listed(full) if full in MODULES else self._member(node.module, alias.name)
            else:
                found = self._listed(alias.name)
                if "." in name:
                    self._refuse(f"write: import {alias.name} as {name.rpartition('.')[2]}")
            self._binding(name)
            (self._modules if isinstance(found, ModuleType) else self._imported)[name] = found

    # Classes

    def _class(self, node: ast.ClassDef) -> None:
        self._binding(node.name)
        if node.keywords or getattr(node, "type_params", None) or node.decorator_list or len(node.bases) > 1:
            self._refuse("a class has one base at most, no keywords and no decorator")
        base = self._base(node.bases[0]) if node.bases else None
        if base is device("grouped").Bounds and not all(isinstance(s, ast.Pass) for s in node.body):
            self._refuse("a class of Bounds holds pass and nothing else: its clamping cannot be edited")
        self._classes[node.name] = base
        local = set(self._constants)
        for statement in node.body:
            self._at(statement)
            match statement:
                case ast.FunctionDef(name=name):
                    self._overridable(name, base)
                    self._member_function(statement, base)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if name not in SETTINGS:
                        self._identifier(name)
                    self._no_hook(name)
                    if base is not None and hasattr(base, name) and name not in GIVEN:
                        self._replaceable(name, base)
                        self._simple(value)
                    else:
                        self._setting(value)
                    self._constants.add(name)
                case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                    pass
                case _:
                    self._refuse("a class holds methods, and values given by name = value")
        self._constants = local

    def _base(self, node: ast.expr) -> type | None:
        from quack.epilogue.ops import EpiOp

        if not isinstance(node, ast.Name):
            self._refuse("write a base class by its imported name")
        if node.id in self._classes:
            return self._classes[node.id]
        found = self._imported.get(node.id)
        bases = device("mainloop").FusedGemm | device("grouped").Bounds | EpiOp
        if not isinstance(found, type) or not issubclass(found, bases):
            self._refuse(
                f"{node.id} is not a base: a step is FusedGemm, TableGemm, GroupedGemm or GatheredGemm, a "
                "resource one of quack.epilogue.ops or primitives.device"
            )
        return found

    def _overridable(self, name: str, base: type | None) -> None:
        if base is None or not hasattr(base, name):
            if name != "__call__" or base is not None:
                self._identifier(name)
            self._no_hook(name)
            return
        step = issubclass(base, device("mainloop").FusedGemm)
        known = STEP_METHODS | {STAGES} if step else RESOURCE_METHODS
        if name not in known:
            self._refuse(
                f"{name} runs on the host when a kernel is launched or compiled, so an author may not write "
                f"it; of {base.__name__} an author may write: {', '.join(sorted(known))}",
                "host",
            )

    def _no_hook(self, name: str) -> None:
        if name.startswith("host_"):
            self._refuse(f"{name}: the host reads this name, so an edit may not define it", "host")

    def _replaceable(self, name: str, base: type) -> None:
        """Check that the base's attribute ``name`` is a plain value, which a class may replace. A class may
        not replace a method, class or property of its base."""
        if not isinstance(getattr(base, name), bool | int | float | str | tuple | None):
            self._refuse(
                f"{name} is a method or class of {base.__name__}, not a value: a class may set only "
                f"{', '.join(sorted(GIVEN))} and numbers of its base",
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
        """Check the value of a class attribute. The value is a simple value, or a call that makes a resource
        (an ``EpiOp``, or ``arguments()``) from such values."""
        self._at(node)
        match node:
            case ast.Tuple(elts=parts) if any(isinstance(p, ast.Call) for p in parts):
                for part in parts:
                    self._setting(part)
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=keywords):
                if not self._makes_resources(name):
                    self._refuse(
                        f"{name} makes no resource: a class body calls only resources and arguments()"
                    )
                for part in [*parts, *(k.value for k in keywords)]:
                    self._setting(part)
            case ast.Name(id=name) if self._is_number_type(name):
                pass
            case _:
                self._simple(node)

    def _makes_resources(self, name: str) -> bool:
        from quack.epilogue.ops import EpiOp

        found = self._classes.get(name, self._imported.get(name))
        return found is device("mainloop").arguments or isinstance(found, type) and issubclass(found, EpiOp)

    def _is_number_type(self, name: str) -> bool:
        import cutlass

        found = self._imported.get(name)
        return isinstance(found, type) and issubclass(found, cutlass.Numeric)

    # Code for the host: arithmetic

    def _launch(self, node: ast.FunctionDef) -> None:
        """Check a vector kernel's ``__call__``: it may compute sizes and then launch the kernel once."""
        names = self._given = self._plain_parameters(node)
        body = [s for s in node.body if not is_docstring(s)]
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
            "stream=stream), with smem, cluster, min_blocks_per_mp and use_pdl if needed: move the rest to "
            "kernel",
            "host",
        )

    def _plain_parameters(self, node: ast.FunctionDef) -> set[str]:
        """The names of the parameters, except a leading ``self``."""
        given = node.args
        self._parameters(given)
        placed = [*given.posonlyargs, *given.args]
        own = placed[:1] if placed and placed[0].arg == "self" else []
        every = (*placed, *given.kwonlyargs, given.vararg, given.kwarg)
        return {a.arg for a in every if a is not None and a not in own}

    def _stages(self, node: ast.FunctionDef) -> None:
        if node.decorator_list:
            self._refuse(f"{STAGES} has no decorator", "host")
        self._given = self._plain_parameters(node)
        for statement in node.body:
            self._stage_statement(statement)

    def _stage_statement(self, statement: ast.stmt) -> None:
        self._at(statement)
        match statement:
            case ast.Expr() | ast.Pass() if is_docstring(statement) or isinstance(statement, ast.Pass):
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
        """Check an expression that runs on the host. The expression may use numbers, and a tensor's shape and
        strides. It must not read a tensor's elements."""
        self._at(node)
        match node:
            case ast.Constant(value=int() | float() | None):
                self._constant(node)
            case ast.Attribute(value=ast.Name(id=name), attr="shape" | "stride") if name in self._given:
                self._value_attribute(node)
            case ast.Name(id=name) if name in self._given:
                self._refuse(
                    f"{name} on the host: the parameters have .shape, .stride and cute.size only; "
                    "memory is for the kernel to read",
                    "host",
                )
            case ast.Name():
                self._name(node)
            case ast.Attribute(value=ast.Name(id=name)) if name in self._modules:
                self._refuse(f"{ast.unparse(node)} on the host: it computes sizes only", "host")
            case ast.Attribute(value=inner):
                self._value_attribute(node)
                if not isinstance(inner, ast.Name) or inner.id != "self" or "self" in self._given:
                    self._refuse(
                        f".{node.attr} on the host: use .shape and .stride of parameters, and values of self",
                        "host",
                    )
            case ast.Subscript(value=inner, slice=index):
                self._arithmetic(inner)
                self._arithmetic(index)
            case ast.Call(func=called, args=parts, keywords=keywords):
                if not self._counts(called):
                    self._refuse(
                        f"{ast.unparse(called)} on the host: it calls min, max, len, cute.size, cute.shape, "
                        f"cute.ceil_div and super().{STAGES} only",
                        "host",
                    )
                for part in [*parts, *(k.value for k in keywords)]:
                    if not self._passed_on(called, part):
                        self._arithmetic(part)
            case (
                ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp()
                | ast.Tuple() | ast.Starred() | ast.Slice()
            ):  # fmt: skip
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._arithmetic(child)
            case _:
                self._refuse("on the host there is arithmetic of sizes only", "host")

    def _passed_on(self, called: ast.expr, part: ast.expr) -> bool:
        """Whether a call uses only this argument's shape, or passes the argument to the base class's
        method."""
        if isinstance(called, ast.Attribute) and is_super(called.value):
            part = part.value if isinstance(part, ast.Starred) else part
        elif not isinstance(called, ast.Attribute) or called.attr not in ("size", "shape"):
            return False
        return isinstance(part, ast.Name) and part.id in self._given

    def _counts(self, called: ast.expr) -> bool:
        match called:
            case ast.Name(id="min" | "max" | "len"):
                return True
            case ast.Attribute(value=inner, attr=name) if is_super(inner):
                return name == STAGES
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._modules:
                known = {"cutlass.cute": {"size", "shape", "ceil_div"}, "cutlass": {"min", "max"}}
                return attribute in known.get(self._modules[name].__name__, ())
        return False


def _module_names(tree: ast.Module) -> Iterator[str]:
    """The names bound at module level; a name bound twice appears twice."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield alias.asname or alias.name
