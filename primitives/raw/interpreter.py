"""Interpret the syntax tree of straight-line arithmetic on fp32 values.

``Functions`` checks the form of an author's functions, and ``Interpreter`` evaluates calls of the functions.
Library functions compute in fp64 and round once to fp32.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coda_agent.primitives.raw.error import RawError

MAX_BYTES = 8 << 10
LINE = 110  # most characters per line, as everywhere in this project
PAGE = 600
STEPS, DEPTH, INTEGER = 2000, 16, 1 << 64


class Beyond(Exception):
    """An operation that the interpreter cannot compute."""


@dataclass
class Functions:
    """The functions and constants in an author's source code (the answer), by name. ``name``: the function
    that the author was asked to write. ``arity``: how many arguments this function takes."""

    name: str
    arity: int
    functions: dict[str, ast.FunctionDef]
    constants: dict[str, ast.expr]

    @classmethod
    def read(cls, source: str, name: str, arity: int) -> Functions:
        """Parse an answer. Raises RawError if the answer has the wrong form."""
        made = cls(name, arity, {}, {})
        if len(source.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise RawError("form", f"the answer is over {MAX_BYTES} bytes: shorten it")
        for number, line in enumerate(source.splitlines(), 1):
            if len(line) > LINE or not re.fullmatch(r"[ -~]*", line):
                raise RawError(
                    "form", f"a line is ASCII text without tabs, of at most {LINE} characters", number
                )
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RawError("syntax", f"syntax error: {error}", getattr(error, "lineno", None)) from None
        for statement in tree.body:
            made._take(statement)
        made._check(name)
        if made.fast:
            made._check(f"{name}_fast")
        made.page  # noqa: B018  (raises RawError for a bad docstring)
        return made

    @property
    def fast(self) -> bool:
        return f"{self.name}_fast" in self.functions

    @property
    def page(self) -> str:
        function = self.functions[self.name]
        words = ast.get_docstring(function)
        if not words or len(words) > PAGE or "\\" in words or '"""' in words:
            wanted = f"of at most {PAGE} characters, without backslashes: authors of kernels read it"
            raise RawError("form", f"{self.name} has a docstring {wanted}", function.lineno)
        return words

    def _take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.FunctionDef(name=name) if name in (self.name, f"{self.name}_fast") or name.startswith(
                f"_{self.name}_"
            ):
                self.functions[name] = statement
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.startswith(
                f"{self.name.upper()}_"
            ):
                self.constants[name] = value
            case _:
                raise RawError(
                    "form",
                    f"an answer holds the functions {self.name} and {self.name}_fast, helpers named "
                    f"_{self.name}_..., and constants named {self.name.upper()}_..., nothing else",
                    statement.lineno,
                )
        if len(self.functions) + len(self.constants) > 32:
            raise RawError("form", "over 32 functions and constants: write fewer", statement.lineno)

    def _check(self, name: str) -> None:
        if name not in self.functions:
            raise RawError("form", f"the answer has no function {name}")
        for function in self.functions.values():
            given = function.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            plain = len(given.args) == len(every) and not given.defaults and not (given.vararg or given.kwarg)
            annotated = all(_is_any(a.annotation) for a in every) and _is_any(function.returns)
            if not plain or not annotated or function.decorator_list:
                said = ", ".join(f"{a.arg}: Any" for a in every)
                raise RawError(
                    "form", f"write def {function.name}({said}) -> Any, undecorated", function.lineno
                )
        if len(self.functions[name].args.args) != self.arity:
            raise RawError("form", f"{name} takes {self.arity} argument(s)", self.functions[name].lineno)


def _is_any(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "Any"


class Interpreter:
    """Calls an author's functions on fp32 arrays. Where CuTeDSL's tracing would compute with a Python number,
    the interpreter does so too."""

    def __init__(self, read: Functions):
        self._read = read
        self._steps = 0
        self._lines: list[int] = []  # the current line of each function on the call stack

    @property
    def line(self) -> int | None:
        """The line of the statement that is executing, or that failed."""
        return self._lines[-1] if self._lines else None

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call a function of the answer. Raises Beyond or RawError."""
        function = self._read.functions[name]
        names = [a.arg for a in function.args.args]
        if len(names) != len(arguments):
            raise RawError(
                "form", f"{name} takes {len(names)} argument(s), not {len(arguments)}", function.lineno
            )
        if len(self._lines) == DEPTH:
            raise Beyond(f"functions that call each other over {DEPTH} deep")
        self._lines.append(function.lineno)
        known = dict(zip(names, arguments, strict=True))
        for statement in function.body:
            self._lines[-1] = statement.lineno
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    pass
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, self.value(value, known), known)
                case ast.AugAssign(target=ast.Name(id=target), op=op, value=value) if target in known:
                    known[target] = self._combined(op, known[target], self.value(value, known))
                case ast.Return(value=ast.expr() as value):
                    found = self.value(value, known)
                    self._lines.pop()
                    return found
                case _:
                    raise Beyond(_quoted(statement))
        raise RawError("form", f"{name} returns nothing", function.lineno)

    def _assign(self, target: ast.expr, value: Any, known: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                known[name] = value
            case ast.Tuple(elts=parts) if isinstance(value, tuple) and len(parts) == len(value):
                for part, one in zip(parts, value, strict=True):
                    self._assign(part, one, known)
            case _:
                raise Beyond(_quoted(target))

    def value(self, node: ast.expr, known: Mapping[str, Any]) -> Any:
        self._steps += 1
        if self._steps > STEPS:
            raise Beyond(f"over {STEPS} operations")
        match node:
            case ast.Constant(value=bool() | int() | float()):
                return node.value
            case ast.Name(id=name) if name in known:
                return known[name]
            case ast.Name(id=name) if name in self._read.constants:
                return self.value(self._read.constants[name], {})
            case ast.Name(id="LOWEST"):
                return -math.inf
            case ast.Attribute(value=ast.Name(id="math"), attr="pi" | "e" | "tau" | "inf" as name):
                return getattr(math, name)
            case ast.Tuple(elts=parts):
                return tuple(self.value(part, known) for part in parts)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand, known)
            case ast.BinOp(left=left, op=op, right=right):
                return self._combined(op, self.value(left, known), self.value(right, known))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
                return COMPARED[type(op)](*_matched(self.value(left, known), self.value(right, known)))
            case ast.Call(func=called, args=arguments, keywords=keywords):
                if not any(isinstance(a, ast.Starred) for a in arguments) and all(
                    k.arg in ("fastmath", "approx", "ftz") for k in keywords
                ):
                    return self._called(called, [self.value(a, known) for a in arguments])
        raise Beyond(_quoted(node))

    def _called(self, called: ast.expr, arguments: list[Any]) -> Any:
        name = ast.unparse(called)
        if name in self._read.functions:
            return self.call(name, arguments)
        if name.startswith("math.") and all(isinstance(a, int | float) for a in arguments):
            function = getattr(math, name.removeprefix("math."), None)
            if not name.removeprefix("math.").startswith("_") and callable(function):
                return function(*arguments)
        function = known_functions().get(name)
        if function is None:
            raise Beyond(name)
        return function(*arguments)

    def _combined(self, op: ast.operator, left: Any, right: Any) -> Any:
        if type(op) not in COMBINED:
            raise Beyond(f"the operator {type(op).__name__}")
        import numpy as np

        bools = [isinstance(v, np.ndarray) and v.dtype == bool for v in (left, right)]
        if any(bools) != isinstance(op, ast.BitAnd | ast.BitOr) or any(bools) != all(bools):
            raise Beyond("arithmetic of conditions")
        if isinstance(op, ast.Pow) and not all(isinstance(v, int | float) for v in (left, right)):
            raise Beyond("**")
        if isinstance(op, ast.Pow) and abs(right) > 64:
            raise Beyond("** of a power over 64")
        found = COMBINED[type(op)](*_matched(left, right))
        if isinstance(found, int) and abs(found) > INTEGER:
            raise Beyond("an integer over 64 bits")
        return found


COMBINED: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def _matched(left: Any, right: Any) -> tuple[Any, Any]:
    """Return the two operands of an operation. If one is an array and the other is a Python number, round the
    number to fp32."""
    import numpy as np

    arrays = [isinstance(v, np.ndarray) for v in (left, right)]
    if any(isinstance(v, tuple) for v in (left, right)):
        raise Beyond("arithmetic of tuples")
    if not any(arrays) or all(arrays):
        return left, right
    return (left, np.float32(right)) if arrays[0] else (np.float32(left), right)


def known_functions() -> dict[str, Callable[..., Any]]:
    """Return functions on fp32 arrays, by the names of their counterparts in ``cute`` and
    ``primitives.device.values``. A function that numpy cannot vectorise runs element by element."""
    import numpy as np

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        """Turn a function into one that computes in fp64 and rounds once to fp32."""

        def rounded(*values: Any) -> Any:
            wide = [np.asarray(np.asarray(v, np.float32), np.float64) for v in values]
            return np.asarray(function(*wide), np.float32)

        return rounded

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    def gelu(x: Any) -> Any:
        return x * sigmoid(2 * x * (0.7978845608028654 + 0.035677408136300125 * x * x))

    def choose(condition: Any, a: Any, b: Any) -> Any:
        if not isinstance(condition, bool | np.bool_ | np.ndarray):
            raise Beyond("a condition that is not a comparison")
        return np.where(condition, np.float32(a), np.float32(b))

    erf, erfc = np.frompyfunc(math.erf, 1, 1), np.frompyfunc(math.erfc, 1, 1)
    plain: dict[str, Callable[..., Any]] = {
        "abs": np.abs, "acos": np.arccos, "acosh": np.arccosh, "add": np.add, "asin": np.arcsin,
        "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2, "atanh": np.arctanh, "cbrt": np.cbrt,
        "ceil": np.ceil, "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh, "div": np.divide,
        "erf": erf, "erfc": erfc, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor,
        "fma": lambda a, b, c: a * b + c, "log": np.log, "log10": np.log10, "log1p": np.log1p,
        "log2": np.log2, "mul": np.multiply, "neg": np.negative, "pow": np.power, "rcp": np.reciprocal,
        "roundeven": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "sinh": np.sinh,
        "sqrt": np.sqrt, "sub": np.subtract, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
    }  # fmt: skip
    values: dict[str, Callable[..., Any]] = {
        "largest": np.fmax, "magnitude": np.abs, "sigmoid": sigmoid, "sigmoid_fast": sigmoid,
        "sine": np.sin, "sine_fast": np.sin, "cosine": np.cos, "cosine_fast": np.cos, "tanh_fast": np.tanh,
        "gelu": gelu, "gelu_fast": gelu, "Float32": lambda x: x,
        "cute.arch.fmax": np.fmax, "cute.arch.fmin": np.fmin, "cute.arch.rcp_approx": np.reciprocal,
    }  # fmt: skip
    made = {f"cute.math.{name}": of(function) for name, function in plain.items()}
    made |= {name: of(function) for name, function in values.items()}
    return made | {"choose": choose, "cutlass.select_": choose}


def _quoted(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0][:80]


def known_words() -> str:
    """List the names of ``known_functions`` for an author."""
    names = list(known_functions())
    inside = [name.removeprefix("cute.math.") for name in names if name.startswith("cute.math.")]
    others = [name for name in names if not name.startswith("cute.math.")]
    return f"{', '.join(others)}, and of cute.math {', '.join(inside)}"
