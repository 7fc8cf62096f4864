"""Check the functions of a module that an author edited. Every name in a function must be known, and no
attribute may reach an object that is not a value of the kernel."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from coda_agent.primitives.frozen_names import frozen_names
from coda_agent.primitives.raw.error import RawError
from coda_agent.primitives.raw.names import (
    BANNED,
    BANNED_PREFIXES,
    BUILTINS,
    CHOSEN,
    MODULES,
    RESOURCE_METHODS,
    SETTINGS,
    STAGES,
    permitted,
)

MAX_INTEGER = 1 << 64

_PLAIN = (
    ast.Expr, ast.Return, ast.Pass, ast.Break, ast.Continue, ast.If, ast.For, ast.While, ast.Assign,
    ast.Assert, ast.AugAssign, ast.With, ast.withitem, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Dict, ast.Tuple, ast.List, ast.Set, ast.ListComp, ast.DictComp, ast.GeneratorExp,
    ast.comprehension, ast.Subscript, ast.Slice, ast.Starred, ast.Lambda, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_REMEDIES: dict[type[ast.AST], tuple[str, str]] = {
    ast.Import: ("an import", "imports must be at the top of the module"),
    ast.ImportFrom: ("an import", "imports must be at the top of the module"),
    ast.ClassDef: ("a class", "classes must be at the top level of the module"),
    ast.Try: ("try", "an error ends the compile and is shown to you with its line"),
    ast.Raise: ("raise", "write assert with a condition"),
    ast.Global: ("global", "pass the value as an argument"),
    ast.Nonlocal: ("nonlocal", "return the value"),
    ast.Delete: ("del", "leave the name alone"),
    ast.NamedExpr: (":=", "assign on a separate line"),
    ast.JoinedStr: ("an f-string", "write the text out"),
    ast.Yield: ("yield", "return a tuple"),
    ast.Await: ("await", "nothing waits in a kernel"),
    ast.Match: ("match", "write if and elif"),
    ast.AnnAssign: ("an annotated assignment", "write name = value"),
}


class Reader:
    """Walks a module's functions. ``line``: the line of the last visited node that has a line."""

    def __init__(self, tree: ast.Module):
        self._tree = tree
        self.line: int | None = None
        self._modules: dict[str, ModuleType] = {}  # imported modules, by the alias in the edited module
        self._imported: dict[str, Any] = {}
        self._constants: set[str] = set()
        self._classes: dict[str, type | None] = {}  # nearest imported base class of each class
        self._bound = set(_bindings(tree))
        self._given: set[str] = set()  # if the visited method runs on the host: its parameters
        self._method = False  # whether the visited node is inside a method, where super() is defined
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

    def _listed(self, name: str) -> ModuleType:
        if name not in MODULES and name not in CHOSEN:
            known = ", ".join(sorted({*MODULES, *CHOSEN}))
            self._refuse(f"{name} cannot be imported here; there are {known}", "vocabulary")
        with frozen_names():
            return importlib.import_module(name)

    def _member(self, module: ModuleType | str, name: str) -> Any:
        module = self._listed(module) if isinstance(module, str) else module
        if not permitted(module, name):
            near = [n for n in dir(module) if permitted(module, n)]
            said = f"; it has {', '.join(near)}" if len(near) <= 60 else ""
            self._refuse(f"{module.__name__} has no {name!r} to use here{said}", "vocabulary")
        return getattr(module, name)

    def _simple(self, node: ast.expr) -> None:
        """Check a value that is evaluated when the module is imported. The value must not refer to a
        function, because no function may have a second name."""
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
                    self._refuse(f"{ast.unparse(node)} is not a number: use it directly where it is needed")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=parts, keywords=[]):
                if name not in self._modules or self._modules[name].__name__ != "math":
                    self._refuse("outside functions, only functions of math may be called")
                self._chain(node.func)
                for part in parts:
                    self._simple(part)
            case _:
                self._refuse("outside functions, a value is a number, a string, or a tuple of values")

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
            if not is_docstring(statement):
                self._visit(statement)

    def _decorator(self, node: ast.FunctionDef) -> str | None:
        """Check a function's decorator, which may be cute's ``jit`` or ``kernel``. Return the decorator's
        name; None if the function has no decorator."""
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
            self._refuse("an annotation may not contain a call")
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
                self._refuse(f"{name} cannot be used here; Python's usable builtins are {known}")
            self._refuse(f"the name {name!r} is unknown here")

    def _binding(self, name: str) -> None:
        self._identifier(name)
        if hasattr(builtins, name):
            self._refuse(f"{name!r} is a name of Python's: choose another")
        if name in self._modules or name in self._imported:
            self._refuse(f"{name!r} is imported: choose another name")

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
            if not is_super(node.value):
                self._visit(node.value)
            elif not self._method:
                self._refuse("super() is for methods")

    def _value_attribute(self, node: ast.Attribute) -> None:
        """Check an expression that uses an attribute of a value. The expression must read the attribute, and
        the attribute's name must be permitted."""
        self._at(node)
        name = node.attr
        self._identifier(name)
        if not isinstance(node.ctx, ast.Load):
            self._refuse(f".{name} cannot be set: keep the value in a name, or write into a fragment")
        if name in BANNED or name.startswith(BANNED_PREFIXES):
            self._refuse(f".{name} leads out of the kernel's values and cannot be used here")
        if name.startswith("_") and name not in SETTINGS | RESOURCE_METHODS | {STAGES}:
            self._refuse(f".{name} is private: use public names, also for your own methods")

    def _chain(self, node: ast.expr) -> Any:
        """Return the object that a dotted name refers to. The name begins with a module, as in
        ``cute.arch.fmax``. Return None if the name's last part is an attribute of a value."""
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
        if is_super(node):
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


def is_super(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
            return True
    return False


def is_docstring(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _bindings(tree: ast.Module) -> Iterator[str]:
    """Yield every name that the module binds, except imported names."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
