"""Family 1, elementwise: arithmetic, activations, pairs of adjacent columns.

Every operation works on tiles, vectors and scalars alike, in fp32 registers. Each one's three
meanings stand together: the symbolic rule (the decorated function's call), PyTorch, and CuTeDSL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from primitives.ir import Attribute, Operation, ProgramError, Type, register
from primitives.trace import Tensor, apply

_SPREAD = {"row": 0, "column": 1}


def broadcast(name: str, types: tuple[Type, ...]) -> Type:
    """The common type of elementwise arguments; ProgramError says which do not meet, and why."""
    result = Type("scalar")
    for given in types:
        result = _meet(name, result, given)
    return result


def _meet(name: str, a: Type, b: Type) -> Type:
    if a.kind == "scalar":
        return b
    if b.kind == "scalar" or a == b:
        return a
    if b.kind == "tile":
        a, b = b, a
    if a.kind == "tile" and b.kind in _SPREAD and a.shape[_SPREAD[b.kind]] == b.shape[0]:
        return a
    if a.kind == "tile" and b.kind == "vector":
        raise ProgramError(
            "broadcast",
            f"{name}: a {b} meets a {a}: say how it spreads, with per_row(v) (one value "
            "a row) or per_column(v) (one a column)",
        )
    if a.kind == "operand" or b.kind == "operand":
        raise ProgramError("broadcast", f"{name}: .mT is for operands of gemm only")
    hint = "; pairs(t) and join(a, b) change a tile's width" if a.kind == b.kind == "tile" else ""
    raise ProgramError("broadcast", f"{name}: {a} and {b} do not fit together{hint}")


def elementwise(
    *, torch: Callable[..., Any], cute: str, fast: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., Tensor]]:
    """Turn a documented signature into an elementwise primitive with these two further meanings."""

    def decorate(function: Callable[..., None]) -> Callable[..., Tensor]:
        name, arity = function.__name__, function.__code__.co_argcount

        def infer(types: tuple[Type, ...], attribute: Attribute) -> Type:
            if len(types) != arity or attribute is not None:
                raise ProgramError("arguments", f"{name} takes {arity} argument(s), not {len(types)}")
            return broadcast(name, types)

        register(Operation(name, infer, torch, cute, fast))

        @functools.wraps(function)
        def primitive(*args: Any) -> Tensor:
            if len(args) != arity:
                raise ProgramError("arguments", f"{name} takes {arity} argument(s), not {len(args)}")
            return apply(name, *args)

        return primitive

    return decorate


@elementwise(torch=lambda torch, a, b: a + b, cute="({0} + {1})")
def add(a, b):
    """``a + b``."""


@elementwise(torch=lambda torch, a, b: a - b, cute="({0} - {1})")
def subtract(a, b):
    """``a - b``."""


@elementwise(torch=lambda torch, a, b: a * b, cute="({0} * {1})")
def multiply(a, b):
    """``a * b``."""


@elementwise(torch=lambda torch, a, b: a / b, cute="({0} / {1})")
def divide(a, b):
    """``a / b``, rounded correctly; where many values share a divisor, multiply by its reciprocal."""


@elementwise(torch=lambda torch, a: -a, cute="(-{0})")
def negative(a):
    """``-a``."""


@elementwise(torch=lambda torch, a, b: (a > b) * 1.0, cute="choose({0} > {1}, 1.0, 0.0)")
def greater(a, b):
    """``a > b``: 1 where it holds, 0 elsewhere."""


@elementwise(torch=lambda torch, a, b: (a >= b) * 1.0, cute="choose({0} >= {1}, 1.0, 0.0)")
def greater_equal(a, b):
    """``a >= b``: 1 where it holds, 0 elsewhere."""


@elementwise(torch=lambda torch, a, b: (a < b) * 1.0, cute="choose({0} < {1}, 1.0, 0.0)")
def less(a, b):
    """``a < b``: 1 where it holds, 0 elsewhere."""


@elementwise(torch=lambda torch, a, b: (a <= b) * 1.0, cute="choose({0} <= {1}, 1.0, 0.0)")
def less_equal(a, b):
    """``a <= b``: 1 where it holds, 0 elsewhere."""


@elementwise(torch=lambda torch, c, a, b: torch.where(c != 0, a, b), cute="choose({0} != 0.0, {1}, {2})")
def where(condition, a, b):
    """Per element ``a`` where the comparison ``condition`` holds, else ``b``. Both are computed.

    ``relu = where(t > 0, t, 0)``
    """


@elementwise(torch=lambda torch, a, b: torch.maximum(a, b), cute="cute.arch.fmax({0}, {1})")
def maximum(a, b):
    """The larger of ``a`` and ``b`` per element. ``maximum(t, 0)`` is ReLU."""


@elementwise(torch=lambda torch, a, b: torch.minimum(a, b), cute="(-cute.arch.fmax(-{0}, -{1}))")
def minimum(a, b):
    """The smaller of ``a`` and ``b`` per element."""


@elementwise(torch=lambda torch, a: torch.exp(a), cute="cute.math.exp({0}, fastmath=True)")
def exp(a):
    """``e ** a``, by the hardware's ex2: about 2 ulp of fp32."""


@elementwise(torch=lambda torch, a: torch.log(a), cute="cute.math.log({0}, fastmath=True)")
def log(a):
    """Natural logarithm, by the hardware's lg2."""


@elementwise(torch=lambda torch, a: torch.sqrt(a), cute="cute.math.sqrt({0})")
def sqrt(a):
    """Square root."""


@elementwise(torch=lambda torch, a: torch.rsqrt(a), cute="cute.math.rsqrt({0}, fastmath=True)")
def rsqrt(a):
    """``1 / sqrt(a)``, by the hardware's rsqrt: about 2 ulp."""


@elementwise(torch=lambda torch, a: torch.tanh(a), cute="cute.math.tanh({0})", fast="tanh_fast({0})")
def tanh(a):
    """Hyperbolic tangent."""


@elementwise(torch=lambda torch, a: torch.sigmoid(a), cute="sigmoid({0})", fast="sigmoid_fast({0})")
def sigmoid(a):
    """``1 / (1 + exp(-a))``. Two special-function instructions: compute it once and reuse the value."""


@elementwise(
    torch=lambda torch, a: a * torch.sigmoid(a), cute="({0} * sigmoid({0}))", fast="({0} * sigmoid_fast({0}))"
)
def silu(a):
    """``a * sigmoid(a)``, also called swish."""
