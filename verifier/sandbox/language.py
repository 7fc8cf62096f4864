"""The language of kernel files: a small part of Python, checked on the syntax tree before anything runs.

The check gives authors errors with a line and a remedy. It is also the innermost protection of the jail. Only
listed kinds of syntax pass. Only three kinds of names pass: names that the file binds, names imported from
``primitives``, and listed builtins. This module needs only the standard library and ``primitives``, since the
jail's child imports it.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import NoReturn

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.kernel_file import BUILTINS
from coda_agent.verifier.sandbox.syntax_tree import MAX_DEPTH, bindings, parse, texts, too_deep

MAX_ITERATIONS = 4096
MAX_INTEGER = 10**15
MAX_EXPONENT = 64

_PLAIN = (
    ast.Return, ast.Pass, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Dict, ast.Tuple, ast.List, ast.Load,
    ast.Store, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.USub,
    ast.UAdd, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip

_BRANCH = "a kernel has no branches: choose per element with where(condition, a, b)"
_LOGIC = (
    "a traced value has no truth value: nest where(condition, a, b), or write a * b for and, maximum(a, b) "
    "for or, 1 - a for not"
)
_LOOP = "loop with for over range(number) or a literal tuple"
_REMEDIES: dict[type[ast.AST], tuple[str, str]] = {
    ast.If: ("if", _BRANCH),
    ast.IfExp: ("... if ... else ...", _BRANCH),
    ast.Match: ("match", _BRANCH),
    ast.BoolOp: ("and / or", _LOGIC),
    ast.Not: ("not", _LOGIC),
    ast.BitAnd: ("&", _LOGIC),
    ast.BitOr: ("|", _LOGIC),
    ast.Invert: ("~", _LOGIC),
    ast.While: ("while", _LOOP),
    ast.Break: ("break", _LOOP),
    ast.Continue: ("continue", _LOOP),
    ast.GeneratorExp: ("a generator", "write a list in brackets"),
    ast.SetComp: ("a set", "write a list or dict"),
    ast.Set: ("a set", "write a list, tuple or dict"),
    ast.Import: ("import", "the one import is: from primitives import ..."),
    ast.MatMult: ("@", "write gemm(a, b), which keeps the accumulator for the epilogue"),
    ast.Mod: ("%", "remainders and formatting are not in the vocabulary"),
    ast.Slice: ("slicing", "pairs(t) takes adjacent columns apart, join(a, b) puts them together"),
    ast.Lambda: ("lambda", "write a function with def, next to the kernel"),
    ast.ClassDef: ("class", "write functions and dicts"),
    ast.Try: ("try", "an error ends the trace and is shown to you with its line"),
    ast.Raise: ("raise", "leave checks to the verifier"),
    ast.Assert: ("assert", "the verifier checks shapes and numbers"),
    ast.JoinedStr: ("an f-string", "strings are names of outputs only: write them out"),
    ast.Starred: ("*arguments", "write the arguments out"),
    ast.AnnAssign: ("an annotation", "write a plain assignment"),
    ast.NamedExpr: (":=", "assign on a separate line"),
}


def check(source: str, allowed: Collection[str]) -> ast.Module:
    """Check a kernel file and return its syntax tree; ``allowed`` is ``primitives.__all__``.

    Raises ProgramError with the line, a message with the remedy, and a code: ``too_large``, ``syntax``,
    ``language``, ``vocabulary`` or ``kernel``.
    """
    tree = parse(source)
    checker = _KernelChecker(tree, frozenset(allowed))
    try:
        checker.visit(tree)
    except RecursionError:
        raise too_deep(checker.line) from None
    return tree


class _KernelChecker:
    """Walk a file's syntax tree and refuse the first fault. ``line`` is the line number of the current node,
    or of the last visited node that has a line number."""

    def __init__(self, tree: ast.Module, allowed: frozenset[str]):
        self._allowed = allowed
        self.line: int | None = None
        self._depth = 0
        self._iterations = 1  # the product of the iterations of all loops around the node
        self._inside: str | None = None  # the function around the current node
        self._imported: set[str] = set()
        self._bound = Counter(bindings(tree))
        self._constants: dict[str, ast.expr] = {}
        self._texts = frozenset(map(id, texts(tree)))
        self._visitors: dict[type[ast.AST], Callable[..., None]] = {
            ast.Module: self._module,
            ast.ImportFrom: self._import,
            ast.FunctionDef: self._function,
            ast.arguments: self._parameters,
            ast.arg: self._parameter,
            ast.Assign: self._assign,
            ast.AugAssign: self._update,
            ast.Expr: self._statement,
            ast.For: self._for,
            ast.ListComp: self._comprehension,
            ast.DictComp: self._comprehension,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.keyword: self._keyword,
            ast.Constant: self._constant,
            ast.Subscript: self._subscript,
        }

    def _refuse(self, message: str, code: str = "language") -> NoReturn:
        raise ProgramError(code, message, self.line)

    def visit(self, node: ast.AST) -> None:
        self.line = getattr(node, "lineno", self.line)
        if self._depth >= MAX_DEPTH:
            raise too_deep(self.line)
        self._depth += 1
        visitor = self._visitors.get(type(node))
        if visitor is not None:
            visitor(node)
        elif isinstance(node, _PLAIN):
            self._plain(node)
        else:
            unknown = (type(node).__name__, "it is not in the language of kernels")
            said, remedy = _REMEDIES.get(type(node), unknown)
            self._refuse(f"{said} cannot be used here: {remedy}")
        self._depth -= 1

    def _children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def _plain(self, node: ast.AST) -> None:
        match node:
            case ast.Compare(ops=[_, _, *_]):
                self._refuse("a < b < c asks for a truth value: compare two at a time, inside where()")
            case ast.BinOp(op=ast.Pow(), right=exponent):
                self._exponent(exponent)
            case ast.Dict(keys=keys) if None in keys:
                self._refuse("**dict cannot be used here: write the entries out")
        self._children(node)

    def _exponent(self, node: ast.expr) -> None:
        match node:
            case ast.Constant(value=int(value) | float(value)) if value <= MAX_EXPONENT:
                pass
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                pass
            case _:
                self._refuse(
                    f"an exponent is a literal of at most {MAX_EXPONENT}: write exp(log(t) * p), and "
                    "exp(0.6931471805599453 * t) for 2 ** t"
                )

    def _module(self, node: ast.Module) -> None:
        for index, statement in enumerate(node.body):
            self.line = statement.lineno
            match statement:
                case ast.ImportFrom() | ast.FunctionDef():
                    self.visit(statement)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not _calls(value):
                    self.visit(statement)
                    self._constants[name] = value
                case ast.Expr(value=ast.Constant(value=str())) if index == 0:
                    pass
                case ast.For() | ast.Expr() | ast.Assign() | ast.AugAssign():
                    self._refuse(
                        "besides functions, a file may contain only imports and literal constants: "
                        "move this into the @kernel function"
                    )
                case _:
                    self.visit(statement)  # refuse the node, with a remedy
        self._count_kernels(node)

    def _count_kernels(self, node: ast.Module) -> None:
        kernels = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
        if len(kernels) != 1:
            self.line = kernels[1].lineno if kernels else None
            self._refuse(f"a kernel file has exactly one @kernel function; this has {len(kernels)}", "kernel")

    def _import(self, node: ast.ImportFrom) -> None:
        if node.module != "primitives" or node.level:
            self._refuse("the one import is: from primitives import ...")
        for alias in node.names:
            if alias.name not in self._allowed:
                self._refuse(
                    f"primitives has no {alias.name!r}; it has {diagnostics.these(self._allowed)}",
                    "vocabulary",
                )
            if alias.asname is not None:
                self._refuse(f"import {alias.name} under its own name, without as")
            self._identifier(alias.name)
            self._imported.add(alias.name)

    def _function(self, node: ast.FunctionDef) -> None:
        if self._inside is not None:
            self._refuse("a function cannot contain another: write it at the top level, beside the kernel")
        if node.returns is not None or getattr(node, "type_params", None):  # since Python 3.12
            self._refuse("annotations cannot be used here: write def f(a, b):")
        for decorator in node.decorator_list:
            self.line = decorator.lineno
            if not isinstance(decorator, ast.Name) or decorator.id != "kernel":
                self._refuse("the one decorator is @kernel, without arguments")
            self.visit(decorator)
        self._binding(node.name)
        self._inside = node.name
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)
        self._inside = None

    def _parameters(self, node: ast.arguments) -> None:
        variadic = node.vararg or node.kwarg
        if variadic:
            self.line = variadic.lineno
            self._refuse("*args and **kwargs cannot be used here: name the parameters")
        self._children(node)

    def _parameter(self, node: ast.arg) -> None:
        if node.annotation is not None:
            self._refuse("annotations cannot be used here: write the parameter's name alone")
        self._binding(node.arg)

    def _assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target)
        self.visit(node.value)

    def _update(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self._refuse("only names can be updated in place")
        self._children(node)
        if isinstance(node.op, ast.Pow):
            self._exponent(node.value)

    def _target(self, node: ast.expr) -> None:
        match node:
            case ast.Name():
                self.visit(node)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._target(part)
            case ast.Subscript(value=ast.Name()):
                self.visit(node)
            case ast.Starred():
                self.visit(node)  # refuse the node, with a remedy
            case _:
                self._refuse("assign to names, or to a dict's entry")

    def _statement(self, node: ast.Expr) -> None:
        match node.value:
            case ast.Constant(value=str()):
                pass  # a docstring
            case ast.Call():
                self.visit(node.value)
            case ast.Yield() | ast.YieldFrom() | ast.Await():
                self._refuse("a kernel returns its outputs once, as a dict")
            case _:
                self._refuse("this line's value is not used: assign it to a name, or remove it")

    def _for(self, node: ast.For) -> None:
        if node.orelse:
            self._refuse("for ... else cannot be used here: write the lines after the loop")
        self._target(node.target)
        self.visit(node.iter)
        around = self._iterations
        self._enter_loop(node.iter)
        for statement in node.body:
            self.visit(statement)
        self._iterations = around

    def _comprehension(self, node: ast.ListComp | ast.DictComp) -> None:
        around = self._iterations
        for part in node.generators:
            if part.ifs or part.is_async:
                self._refuse("a comprehension cannot filter: write the list out")
            self._target(part.target)
            self.visit(part.iter)
            self._enter_loop(part.iter)
        for value in (node.elt,) if isinstance(node, ast.ListComp) else (node.key, node.value):
            self.visit(value)
        self._iterations = around

    def _enter_loop(self, over: ast.expr) -> None:
        self._iterations *= self._length(over)
        if self._iterations > MAX_ITERATIONS:
            self._refuse(
                f"the loops run {self._iterations} times, and at most {MAX_ITERATIONS} are traced: "
                "a tile's rows and columns need no loop"
            )

    def _length(self, node: ast.expr) -> int:
        """The number of iterations of a loop over ``node``, computed without running anything."""
        match node:
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
                return len(parts)
            case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]) if arguments:
                try:
                    return len(range(*(self._integer(a) for a in arguments)))
                except (TypeError, ValueError, OverflowError):
                    self._refuse("range() takes one to three numbers, the third not zero")
            case ast.Call(func=ast.Name(id="enumerate" | "reversed"), args=[inner]):
                return self._length(inner)
            case ast.Call(func=ast.Name(id="zip"), args=[_, *_] as parts):
                return min(self._length(part) for part in parts)
            case ast.Name(id=name) if name in self._constants and self._bound[name] == 1:
                return self._length(self._constants[name])
        self._refuse("a loop's length must be plain to see: " + _LOOP + ", or zip or enumerate of those")

    def _integer(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._integer(operand)
            case ast.Name(id=name) if name in self._constants and self._bound[name] == 1:
                return self._integer(self._constants[name])
        self._refuse("range() takes whole numbers written out, or a constant of the file")

    def _name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._binding(node.id)
            return
        self._identifier(node.id)
        if node.id in self._bound or node.id in self._imported or node.id in BUILTINS:
            return
        if node.id == "print":
            self._refuse(
                "print has nothing to show: a kernel computes nothing here. Remove it; "
                "to see a value, return it as an output"
            )
        self._refuse(f"the name {node.id!r} is unknown here: {diagnostics.unknown(node.id, self._allowed)}")

    def _binding(self, name: str) -> None:
        self._identifier(name)
        if name in BUILTINS:
            self._refuse(f"{name!r} is a name of Python's: choose another")

    def _identifier(self, name: str) -> None:
        if (name.startswith("_") and name != "_") or "__" in name:
            self._refuse(f"{name!r}: a name must not start with _ or contain __")

    def _attribute(self, node: ast.Attribute) -> None:
        if node.attr not in diagnostics.ATTRIBUTES or isinstance(node.ctx, ast.Store):
            self._refuse(diagnostics.no_attribute(node.attr, self._allowed))
        self.visit(node.value)

    def _call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name) and not isinstance(node.func, ast.Attribute):
            self._refuse("call functions by their name")
        self._children(node)

    def _keyword(self, node: ast.keyword) -> None:
        if node.arg is None:
            self._refuse("**arguments cannot be used here: write the arguments out")
        self._identifier(node.arg)
        self.visit(node.value)

    def _constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool() | None:
                pass
            case str():
                if id(node) not in self._texts:
                    self._refuse("strings are docstrings, keys or arguments; they cannot be computed with")
            case int(value) if abs(value) > MAX_INTEGER:
                self._refuse(f"an integer over {MAX_INTEGER:.0e}: write it as a float, such as 1e18")
            case float(value) if not math.isfinite(value):
                self._refuse(f"a constant that is infinite in double precision: write {diagnostics.FINITE}")
            case int() | float():
                pass
            case value:
                self._refuse(f"a {type(value).__name__} literal cannot be used here: numbers are real")

    def _subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Tuple) and any(isinstance(p, ast.Slice) for p in node.slice.elts):
            self.visit(ast.copy_location(ast.Slice(), node))  # refuse the node, with a remedy
        self._children(node)


def _calls(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Call) for part in ast.walk(node))
