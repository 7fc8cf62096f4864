"""Inline calls of helpers. A helper is a function of the same file whose body is one return expression."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from coda_agent.agent.scaffold.torch_names import number, top_level

Fail = Callable[[ast.AST, str], Exception]

BINDERS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await)
SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


class Helper:
    """A function or lambda at the file's top level. ``value`` is the helper's return expression, or None if
    calls of the helper cannot be inlined."""

    def __init__(self, args: ast.arguments, value: ast.expr | None):
        simple = value and not (
            args.vararg or args.kwarg or any(isinstance(n, BINDERS) for n in ast.walk(value))
        )
        self.value = value if simple else None
        self.positional = [a.arg for a in (*args.posonlyargs, *args.args)]
        self.parameters = [*self.positional, *(a.arg for a in args.kwonlyargs)]
        late = self.positional[len(self.positional) - len(args.defaults) :]
        pairs = [*zip(late, args.defaults, strict=True)]
        pairs += [(a.arg, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d]
        self.defaults = {name: default for name, default in pairs if _is_constant(default)}

    def bound(self, call: ast.Call) -> dict[str, ast.expr] | None:
        """Return the arguments of ``call`` by parameter. Return None if an argument is missing, unknown or
        starred."""
        if any(isinstance(a, ast.Starred) for a in call.args) or len(call.args) > len(self.positional):
            return None
        arguments: dict[str, ast.expr] = dict(zip(self.positional, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg not in self.parameters or keyword.arg in arguments:
                return None
            arguments[keyword.arg] = keyword.value
        bound = {**self.defaults, **arguments}
        return bound if bound.keys() == set(self.parameters) else None


def helpers(tree: ast.Module, decorators: Collection[str]) -> dict[str, Helper]:
    """Return a file's helpers by name. ``decorators``: names of decorators that do not change a helper's
    value."""
    candidates: dict[str, Helper] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name, args=args, body=body):
                code = body[1:] if ast.get_docstring(node) is not None else body
                used = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
                value = code[0].value if len(code) == 1 and isinstance(code[0], ast.Return) else None
                candidates[name] = Helper(args, value if used <= set(decorators) else None)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda(args=args, body=value)):
                candidates[name] = Helper(args, value)
    bound = Counter(name for name, _ in top_level(tree))
    return {name: helper for name, helper in candidates.items() if bound[name] == 1}


class Inlined(ast.NodeTransformer):
    """Inlines the calls of helpers in a function's statements. ``own``: the names of the function's
    parameters and variables, which hide equal names at the file's top level. ``taken``: all names in the
    file. ``fail``: creates an error that names the line of a node."""

    def __init__(self, helpers: Mapping[str, Helper], own: Collection[str], taken: set[str], fail: Fail):
        self.helpers, self.own, self.taken, self.fail = helpers, own, set(taken), fail
        self.before: list[ast.stmt] = []
        self.statement: ast.stmt = ast.Pass()
        self.calling: list[str] = []
        self.scopes = 0

    def body(self, statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield each statement with its calls of helpers inlined. Before a statement, yield assignments of
        the arguments that a helper reads more than once."""
        for node in statements:
            self.before, self.statement = [], node
            if isinstance(node, ast.For):
                node.iter = self.visit(node.iter)
                before, inner = self.before, node.body
                node.body = list(self.body(inner))
                yield from (*before, node)
            else:
                inlined = self.visit(node)
                yield from (*self.before, inlined)

    def visit(self, node: ast.AST) -> Any:
        scope = isinstance(node, SCOPES)
        self.scopes += scope
        visited = super().visit(node)
        self.scopes -= scope
        return visited

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id in self.own:
            return node
        name, helper = node.func.id, self.helpers.get(node.func.id)
        if helper is None or helper.value is None:
            return node
        if name in self.calling:
            raise self.fail(node, f"helper {name} calls itself; write out what it computes")
        bound = helper.bound(node)
        if bound is None:
            raise self.fail(node, f"{ast.unparse(node)} does not fit the parameters of {name}; correct it")
        self._refuse_capture(node, name, helper.value, bound)
        value = _Bound(self._once(node, helper.value, bound)).visit(copy.deepcopy(helper.value))
        self.calling.append(name)
        inlined: ast.AST = self.visit(value)
        self.calling.pop()
        return inlined

    def _refuse_capture(self, node: ast.Call, name: str, value: ast.expr, bound: Collection[str]) -> None:
        """Raise ScaffoldError if the helper reads a top-level name of the file, and the function has a
        variable of the same name."""
        for read in (n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id not in bound):
            if read in self.own:
                message = f"helper {name} reads the file's {read}, but the function has its own {read}"
                raise self.fail(node, f"{message}; rename one of them")

    def _once(self, node: ast.Call, value: ast.expr, bound: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
        """Return an expression for each parameter. Assign an argument that the helper reads more than once to
        a new name, so that the argument is computed only once."""
        uses = Counter(n.id for n in ast.walk(value) if isinstance(n, ast.Name))
        arguments = dict(bound)
        for parameter, argument in bound.items():
            if uses[parameter] > 1 and not (isinstance(argument, ast.Name) or _is_constant(argument)):
                if self.scopes:
                    raise self.fail(node, f"{ast.unparse(node)}: replace this call by the helper's body")
                name = next(
                    n for i in range(1, len(self.taken) + 2) if (n := f"{parameter}_{i}") not in self.taken
                )
                self.taken.add(name)
                assignment = ast.Assign([ast.Name(name, ast.Store())], argument)
                self.before.append(ast.fix_missing_locations(ast.copy_location(assignment, self.statement)))
                arguments[parameter] = ast.Name(name, ast.Load())
        return arguments


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or number(node) is not None


class _Bound(ast.NodeTransformer):
    def __init__(self, arguments: Mapping[str, ast.expr]):
        self.arguments = arguments

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.arguments[node.id]) if node.id in self.arguments else node
