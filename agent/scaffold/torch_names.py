"""Rewrite a function's statements with the names that a reference can use: ``torch`` and the functions of
torch.nn.functional."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Literal

FUNCTIONAL = "torch.nn.functional"
FLOATS = (
    *("bfloat16", "double", "float", "float16", "float32", "float64", "half"),
    *("float8_e4m3fn", "float8_e5m2"),
)
Casts = Literal["kept", "to fp64", "removed"]  # what happens to casts to floating dtypes


@dataclass(frozen=True)
class Names:
    """The meaning of names in a function.

    ``own``: the names of the function's parameters and variables, which hide equal names at the file's top
    level. ``imported``: the full name of each imported name. ``numbers``: numeric constants at the file's top
    level. ``defined``: for each top-level name, the line that defines it. ``fail``: creates an error that
    names the line of a node.
    """

    own: Set[str]
    imported: Mapping[str, str]
    numbers: Mapping[str, float]
    defined: Mapping[str, int]
    fail: Callable[[ast.AST, str], Exception]

    @classmethod
    def of(cls, tree: ast.Module, node: ast.FunctionDef, fail: Callable[[ast.AST, str], Exception]) -> Names:
        stored = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        own = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)} | set(stored)
        imported = dict(_imported([*tree.body, *ast.walk(node)]))
        imported |= _aliases(tree, imported)
        imported = {k: v for k, v in imported.items() if k not in own}
        defined = {k: line for k, line in top_level(tree) if k not in own}
        return cls(own, imported, {k: v for k, v in _numbers(tree) if k not in own}, defined, fail)


class TorchNames(ast.NodeTransformer):
    """Rewrites a statement with the names that a reference can use. Casts to a tensor's own dtype are not
    changed to casts to fp64, because a reference's tensors are in fp64."""

    def __init__(self, names: Names, casts: Casts):
        self.names, self.casts = names, casts

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        plain = ast.Assign([node.target], node.value, lineno=node.lineno, col_offset=node.col_offset)
        return self.visit_Assign(plain)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Drop ``h = h``, which remains after the cast of ``h = h.float()`` is removed."""
        new = self.generic_visit(node)
        idle = isinstance(new, ast.Assign) and [ast.unparse(new.value)] == list(map(ast.unparse, new.targets))
        return None if idle else new

    def visit_For(self, node: ast.For) -> ast.AST:
        loop = self.generic_visit(node)
        if isinstance(loop, ast.For) and not loop.body:
            loop.body = [ast.Pass()]
        return loop

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self._dotted(node.func) or ""
        if called.startswith("math.") and (value := _math_value(called, node)) is not None:
            return _literal(value)
        if called == "math.sqrt" and len(node.args) == 1:
            return ast.BinOp(self.visit(node.args[0]), ast.Pow(), ast.Constant(0.5))
        call = self.generic_visit(node)
        if self.casts == "kept" or not isinstance(call, ast.Call):
            return call
        if self.casts == "to fp64":
            return _to_fp64(call)
        if _is_cast(call) and isinstance(call.func, ast.Attribute):
            return call.func.value
        call.keywords = [k for k in call.keywords if not _gives_dtype(k)]
        return call

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        dotted = self._dotted(node)
        return self._in_scope(dotted, node) if dotted else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store):  # A local name may hide a top-level one.
            return node
        if node.id in self.names.numbers:
            return _literal(self.names.numbers[node.id])
        dotted = self._dotted(node)
        if not dotted and node.id in self.names.defined:
            raise self.names.fail(
                node,
                f"{node.id} is defined on line {self.names.defined[node.id]}, but it is not a helper of one "
                "return expression; write its value here",
            )
        return self._in_scope(dotted, node) if dotted else node

    def _dotted(self, node: ast.AST) -> str | None:
        """Return the full name of an imported name, or None for any other expression."""
        if isinstance(node, ast.Name):
            return self.names.imported.get(node.id)
        base = self._dotted(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else None

    def _in_scope(self, dotted: str, node: ast.expr) -> ast.expr:
        module, _, name = dotted.rpartition(".")
        if module == FUNCTIONAL and name not in self.names.own and not name.startswith("_"):
            return ast.Name(name, ast.Load())
        if (
            module == "math"
            and isinstance(value := getattr(math, name, None), float)
            and math.isfinite(value)
        ):
            return ast.Constant(value)
        if dotted.partition(".")[0] != "torch":
            raise self.names.fail(
                node,
                f"{ast.unparse(node)} is imported, and a reference can use only torch's names; "
                "write here what it computes",
            )
        return ast.parse(dotted, mode="eval").body


def top_level(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each binding at a file's top level, except imports."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        else:
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from ((n.id, n.lineno) for n in names)


def _aliases(tree: ast.Module, imported: Mapping[str, str]) -> dict[str, str]:
    """Return the full names of aliases that the file defines, such as ``act = F.silu``."""
    bound = Counter(name for name, _ in top_level(tree))
    aliases: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Attribute() as value):
                first, dot, rest = ast.unparse(value).partition(".")
                if bound[name] == 1 and first in imported:
                    aliases[name] = imported[first] + dot + rest
    return aliases


def _imported(nodes: Iterable[ast.stmt | ast.AST]) -> Iterator[tuple[str, str]]:
    """For each import, yield the name that the file uses, and the full name."""
    yield "torch", "torch"
    for node in nodes:
        if isinstance(node, ast.Import):
            for a in node.names:
                yield (a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)


def _numbers(tree: ast.Module) -> Iterator[tuple[str, int | float]]:
    """Yield the name and value of each numeric top-level constant that the file assigns only once."""
    every = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if every.count(name) == 1 and (found := number(value)) is not None:
                yield name, found


def number(node: ast.expr | None) -> int | float | None:
    """Return the value of a number's expression, such as ``-1``, or None for any other expression."""
    try:
        value = ast.literal_eval(node) if node else None
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, int | float) else None


def _literal(value: float) -> ast.expr:
    """Return an expression. The sign of a negative number is an operator, so that unparsing sets
    parentheses."""
    return ast.parse(repr(value), mode="eval").body


def _math_value(called: str, node: ast.Call) -> float | None:
    """Return the value of a call such as ``math.log(2.0)``, or None if an argument or the value is not a
    number."""
    try:
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        value = getattr(math, called.partition(".")[2])(*map(ast.literal_eval, node.args), **keywords)
        return value if isinstance(value, int | float) and math.isfinite(value) else None
    except (AttributeError, ArithmeticError, TypeError, ValueError):
        return None


def _is_cast(node: ast.Call) -> bool:
    values = [*node.args, *(k.value for k in node.keywords)]
    match node.func:
        case ast.Attribute(attr="type_as"):
            return True
        case ast.Attribute(attr="to" | "type"):
            return len(values) == 1 and _is_float(values[0])
        case ast.Attribute(attr=name):
            return name in FLOATS and not values
    return False


def _to_fp64(call: ast.Call) -> ast.Call:
    values = [*call.args, *(k.value for k in call.keywords)]
    if _is_cast(call) and isinstance(call.func, ast.Attribute) and all(map(_is_named, values)):
        return ast.Call(ast.Attribute(call.func.value, "double", ast.Load()), [], [])
    for keyword in filter(_gives_dtype, call.keywords):
        keyword.value = ast.parse("torch.float64", mode="eval").body
    return call


def _gives_dtype(keyword: ast.keyword) -> bool:
    return keyword.arg in ("dtype", "out_dtype") and _is_named(keyword.value)


def _is_named(node: ast.expr) -> bool:
    """Return whether an expression is a floating dtype of torch, such as ``torch.float32``."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name in FLOATS
    return False


def _is_float(node: ast.expr) -> bool:
    """Return whether an expression looks like a floating dtype: ``torch.float32``, ``x.dtype``, or a name
    that contains "dtype"."""
    if _is_named(node):
        return True
    match node:
        case ast.Attribute(attr="dtype"):
            return True
        case ast.Name(id=name):
            return "dtype" in name
    return False


def without_idle_dtypes(statements: list[ast.stmt | None]) -> list[ast.stmt | None]:
    """Return the statements with None in place of each unused assignment such as ``dtype = x.dtype``."""
    present = [node for node in statements if node]
    names = [n for node in present for n in ast.walk(node) if isinstance(n, ast.Name)]
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}

    def idle(node: ast.stmt | None) -> bool:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return name not in read and _is_float(value)
        return False

    return [None if idle(node) else node for node in statements]
