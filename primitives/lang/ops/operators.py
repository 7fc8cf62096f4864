"""Family 1, elementwise: how arguments broadcast, and Python's operators on tensors.

``elementwise`` makes a primitive from a function that has only a signature and a docstring. The module
``ops.elementwise`` has the elementwise functions that kernels import.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Attribute, Derivative, Operation, Sides, register
from coda_agent.primitives.lang.signature import Type
from coda_agent.primitives.lang.trace import Tensor, apply


def broadcast(name: str, types: tuple[Type, ...]) -> Type:
    """Return the type to which elementwise arguments of these types broadcast. Raises ProgramError if two
    arguments do not fit together; the message says why."""
    result = Type("scalar")
    for given in types:
        result = _meet(name, result, given)
    return result


def _meet(name: str, a: Type, b: Type) -> Type:
    if b.kind == "range":
        raise ProgramError(
            "broadcast",
            f"{name}: {b} can only be an output; compute over the whole tile, and take its columns last",
        )
    if "experts" in (a.kind, b.kind):
        raise ProgramError("broadcast", f"{name}: a matrix for each expert is an operand of gemm only")
    if a.kind == "scalar":
        return b
    if b.kind == "scalar" or a == b:
        return a
    for wide, narrow in ((a, b), (b, a)):
        if covers(wide, narrow):
            return wide
        if (wide.kind, narrow.kind) == ("row", "column"):  # such as an outer product
            return Type("tile", (*wide.shape, *narrow.shape))
    if "operand" in (a.kind, b.kind):
        raise ProgramError("broadcast", f"{name}: .mT is for operands of gemm only")
    raise ProgramError("broadcast", f"{name}: {a} and {b} do not fit together{_remedy(a, b)}")


def covers(wide: Type, narrow: Type) -> bool:
    """Whether a value of type ``narrow`` can be broadcast to ``wide``, a tile or head statistic."""
    if wide.kind not in ("tile", "head") or narrow.kind == "scalar":
        return wide.kind == "tile"
    rows, columns = wide.shape
    match narrow.kind:
        case "row":
            return narrow.shape[0] == rows
        case "column":
            return wide.kind == "tile" and narrow.shape[0] == columns
        case "spread":
            return (
                wide.kind == "tile" and narrow.shape[0] == rows and _heads(columns, narrow) == narrow.shape[1]
            )
        case "repeated":
            fits = wide.kind == "tile" and _heads(columns, narrow) is not None
            return fits and (len(narrow.shape) == 1 or narrow.shape[0] == rows)
    return False


def _heads(columns: Dim, narrow: Type) -> Dim | None:
    """Return the number of heads if each head has ``narrow.period`` columns; None if ``columns`` is no
    multiple of the period."""
    try:
        return columns.divided(narrow.period) if narrow.period else None
    except ValueError:
        return None


def _remedy(a: Type, b: Type) -> str:
    kinds = {a.kind, b.kind}
    if kinds == {"tile", "vector"}:
        return ": spread the vector with per_row(v) (one value per row) or per_column(v) (one per column)"
    if kinds == {"tile", "head"}:
        return ": spread the statistic with per_head(v)"
    if "repeated" in kinds:
        return ": per_head(v) repeats a vector [W] or an input [M, W] over a tile [M, H*W] of H heads"
    if kinds in ({"tile", "row"}, {"tile", "column"}):
        return ": over a tile [M, N], per_row(v) takes a vector [M], and per_column(v) a vector [N]"
    if kinds == {"tile"} and a.shape[0] != b.shape[0]:
        return f": their rows differ, {a.shape[0]} and {b.shape[0]}; {diagnostics.ROWS}"
    if kinds == {"tile"} and a.shape[1].ratio(b.shape[1]) is None:
        return f": their columns, {a.shape[1]} and {b.shape[1]}, are different sizes"
    if kinds == {"tile"}:
        return "; pairs(t) and join(a, b) change a tile's width"
    return ""


def elementwise(
    *,
    torch: Callable[..., Any],
    cute: str,
    fast: str | None = None,
    sides: Callable[..., Sides] | None = None,
    limit: Callable[..., Any] | None = None,
    derivative: Derivative | None = None,
    caveat: str = "",
) -> Callable[[Callable[..., None]], Callable[..., Tensor]]:
    """Return a decorator for a function that has only a signature and a docstring. The decorator makes the
    function an elementwise primitive with these definitions (see ``Operation``)."""

    def decorate(function: Callable[..., None]) -> Callable[..., Tensor]:
        name, arity = function.__name__, function.__code__.co_argcount

        def infer(types: tuple[Type, ...], attribute: Attribute) -> Type:
            if len(types) != arity:
                raise ProgramError("arguments", f"{name} takes {arity} argument(s), not {len(types)}")
            return broadcast(name, types)

        meanings = Operation(name, infer, torch, cute, fast, sides=sides, limit=limit)
        register(meanings._replace(derivative=derivative, caveat=caveat))

        @functools.wraps(function)
        def primitive(*args: Any, **named: Any) -> Tensor:
            if named:
                by_place = ", ".join(function.__code__.co_varnames)
                raise ProgramError("arguments", f"{name} takes its arguments by position: {name}({by_place})")
            return apply(name, *args)

        return primitive

    return decorate


@elementwise(
    torch=lambda torch, a, b: a + b,
    cute="({0} + {1})",
    derivative=lambda g, y, a, b: (g, g),
)
def add(a, b):
    """``a + b``."""


@elementwise(
    torch=lambda torch, a, b: a - b,
    cute="({0} - {1})",
    derivative=lambda g, y, a, b: (g, -g),
)
def subtract(a, b):
    """``a - b``."""


@elementwise(
    torch=lambda torch, a, b: a * b,
    cute="({0} * {1})",
    derivative=lambda g, y, a, b: (g * b, g * a),
)
def multiply(a, b):
    """``a * b``."""


@elementwise(
    torch=lambda torch, a, b: a / b,
    cute="({0} / {1})",
    derivative=lambda g, y, a, b: (g / b, -(g * y) / b),
)
def divide(a, b):
    """``a / b``, rounded correctly; if many values share a divisor, multiply by its reciprocal."""


@elementwise(torch=lambda torch, a: -a, cute="(-{0})", derivative=lambda g, y, a: (-g,))
def negative(a):
    """``-a``."""


def comparison(
    symbol: str, holds: Callable[[Any, Any], Any]
) -> Callable[[Callable[..., None]], Callable[..., Tensor]]:
    """Return a decorator for a function that has only a signature and a docstring. The decorator makes the
    function a comparison, whose value is 1 where ``holds`` is true and 0 elsewhere."""

    def sides(torch: Any, a: Any, b: Any) -> Sides:
        return (holds(a, b), torch.ones(())), (~holds(a, b), torch.zeros(()))

    return elementwise(
        torch=lambda torch, a, b: holds(a, b) * 1.0,
        cute=f"choose({{0}} {symbol} {{1}}, 1.0, 0.0)",
        sides=sides,
        derivative=lambda g, y, a, b: (None, None),
    )


@comparison(">", operator.gt)
def greater(a, b):
    """``a > b``: 1 where it holds, 0 elsewhere."""


@comparison(">=", operator.ge)
def greater_equal(a, b):
    """``a >= b``: 1 where it holds, 0 elsewhere."""


@comparison("<", operator.lt)
def less(a, b):
    """``a < b``: 1 where it holds, 0 elsewhere."""


@comparison("<=", operator.le)
def less_equal(a, b):
    """``a <= b``: 1 where it holds, 0 elsewhere."""


@comparison("==", operator.eq)
def equal(a, b):
    """``a == b``: 1 where it holds, 0 elsewhere. Indices are exact up to 2**24."""


@comparison("!=", operator.ne)
def not_equal(a, b):
    """``a != b``: 1 where it holds, 0 elsewhere."""
