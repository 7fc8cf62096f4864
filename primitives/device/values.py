"""Functions of register values, which are fp32."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.activation import sigmoid
from quack.activation import sigmoid_tanh as sigmoid_fast
from quack.activation import tanh as tanh_fast

__all__ = [
    "LOWEST",
    "choose",
    "cosine",
    "cosine_fast",
    "gelu",
    "gelu_fast",
    "largest",
    "magnitude",
    "sigmoid",
    "sigmoid_fast",
    "sine",
    "sine_fast",
    "tanh_fast",
]

LOWEST = -math.inf  # the identity of a maximum, and what a log-sum-exp leaves out


def choose(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, else ``b``: a select, no branch."""
    if isinstance(condition, bool):  # of two literals
        return Float32(a if condition else b)
    return cutlass.select_(condition, Float32(a), Float32(b))


def largest(a: Any, b: Any) -> Any:
    """The larger of two values."""
    return cute.arch.fmax(Float32(a), Float32(b))


def magnitude(a: Any) -> Any:
    """The absolute value."""
    return cute.arch.fmax(Float32(a), -Float32(a))


TURN = (
    6.28125,
    0.0019353071795864769,
)  # 2 pi, its first part with eight bits: whole turns times it are exact


def _reduced(x: Any) -> Any:
    """An angle less its whole turns, in [-pi, pi]."""
    turns = cute.math.floor(x * (1 / math.tau) + 0.5)
    return (x - turns * TURN[0]) - turns * TURN[1]


def sine_fast(x: Any) -> Any:
    """Sine by the hardware's instruction, which is absolute to 2**-20 within a turn."""
    return cute.math.sin(_reduced(x), fastmath=True)


def cosine_fast(x: Any) -> Any:
    """Cosine, as sine_fast."""
    return cute.math.cos(_reduced(x), fastmath=True)


def sine(x: Any) -> Any:
    """Sine to a few ulp."""
    return cute.math.sin(x)


def cosine(x: Any) -> Any:
    """Cosine to a few ulp."""
    return cute.math.cos(x)


def _gelu_inner(x: Any) -> Any:
    return x * (0.7978845608028654 + 0.035677408136300125 * x * x)


def gelu(x: Any) -> Any:
    """GELU in its tanh form, which is x times a sigmoid: no cancellation for large negative x."""
    return x * sigmoid(2.0 * _gelu_inner(x))


def gelu_fast(x: Any) -> Any:
    """GELU by the hardware's tanh."""
    half = 0.5 * x
    return half + half * tanh_fast(_gelu_inner(x))
