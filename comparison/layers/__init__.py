"""Variants of a whole Transformer layer, to compare their times: forward only, and forward with backward.

Importing this module imports neither PyTorch nor the compiler.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.comparison.competitors import COMPILE, EAGER, FUSED, LIGER, LIGER_APART, QUACK
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE, under_compile

if TYPE_CHECKING:
    from coda_agent.comparison.layers.layer import Layer
    from coda_agent.comparison.layers.shape import Drawn, Shape

VARIANTS = (EAGER, COMPILE, MAX_AUTOTUNE, LIGER, LIGER_APART, QUACK, FUSED)


def variant(name: str, shape: Shape, drawn: Drawn) -> Layer[Any, Any]:
    """Build the variant ``name`` of a layer with the weights in ``drawn``, on the device of these weights.

    A compiled variant compiles during its first calls. Raises ValueError for an unknown name, and ImportError
    if Liger is not installed.
    """
    from coda_agent.comparison.layers.fused import Fused
    from coda_agent.comparison.layers.liger import Liger
    from coda_agent.comparison.layers.plain import Plain

    weights, next_norm = drawn.weights, drawn.next_norm
    if name == EAGER:
        return Plain(shape, weights, next_norm)
    if name in (COMPILE, MAX_AUTOTUNE):
        mode = "max-autotune" if name == MAX_AUTOTUNE else "default"
        return Plain(shape, weights, next_norm, partial(under_compile, mode=mode))
    if name in (LIGER, LIGER_APART):
        return Liger(shape, weights, next_norm, apart=name == LIGER_APART)
    if name == QUACK:
        from coda_agent.comparison.layers.quack import Quack  # imports the compiler, which takes seconds

        return Quack(shape, weights, next_norm)
    if name == FUSED:
        return Fused(shape, weights, next_norm, partial(under_compile, mode="default"))
    raise ValueError(f"variant {name!r} is unknown; use one of {', '.join(VARIANTS)}")
