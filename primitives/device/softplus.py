"""softplus: of register values, which are fp32."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from primitives.device.values import largest

__all__ = ["softplus", "softplus_fast"]


def _softplus_tail(x: Any) -> Any:
    """exp(-abs(x)), in [0, 1]."""
    return cute.math.exp2(cute.math.abs(x) * -1.4426950408889634, fastmath=True)


def softplus(x: Any) -> Any:
    """``log(1 + exp(x))``, without overflow for large x and with full relative accuracy for very negative x.

    One MUFU (of exp) and some 11 other instructions: a polynomial takes the place of the logarithm.
    """
    u = _softplus_tail(x)
    p = u * 0.0053670253 - 0.0300711693
    p = p * u + 0.0792063263
    p = p * u - 0.1375320226
    p = p * u + 0.1915290984
    p = p * u - 0.2485681352
    p = p * u + 0.3332125101
    p = p * u - 0.4999964292
    p = p * u + 1.0
    return p * u + largest(x, 0.0)


def softplus_fast(x: Any) -> Any:
    """As softplus, with a shorter polynomial: one MUFU and some 7 other instructions."""
    u = _softplus_tail(x)
    p = u * 0.04311575 - 0.1613588
    p = p * u + 0.3092014
    p = p * u - 0.4977643
    p = p * u + 1.0
    return p * u + largest(x, 0.0)
