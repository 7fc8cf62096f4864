"""Inputs that depend on each other, as in practice: targets near predictions, one operand near another.

Independent draws never bring the two sides of a difference close to each other. Then a sum of squares
``a*a - 2*a*b + b*b`` looks as exact as ``(a - b)**2``.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from coda_agent.verifier.numerics.inputs import draw_free, typical
from coda_agent.verifier.numerics.reference import Tensors, cast, intermediates
from coda_agent.verifier.numerics.stretch import legal
from coda_agent.verifier.numerics.values import DTYPES, Sizes
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import TensorSpec

NEAR = 2.0**-6  # relative distance of an input from the value that it is near to


def dependent(spec: Spec, sizes: Sizes, seed: int) -> dict[str, Tensor]:
    """Draw inputs, then move each close to one of the reference's intermediate values of its shape that do
    not depend on it. An index becomes the place of the largest value of each row."""
    random, inputs = Random(seed), draw_free(spec, sizes, seed)
    other = draw_free(spec, sizes, seed + 1)
    for name, tensor in spec.drawn.items():
        if tensor.init.offsets is None and tensor.shape:
            before, after = (_values(spec, inputs | changed, sizes) for changed in ({}, {name: other[name]}))
            fixed = [a for a, b in zip(before, after, strict=False) if torch.equal(a, b)]
            near = [value for a in fixed if (value := _near(tensor, inputs[name], a, sizes)) is not None]
            if near:
                of = typical(tensor, name, sizes, seed)
                noise = NEAR * torch.randn(near[0].shape, generator=of.own, dtype=torch.float64)
                value = random.choice(near).double()
                moved = value if tensor.dtype.startswith("int") else value * (1 + noise)
                inputs[name] = legal(of, moved).to(DTYPES[tensor.dtype])
    return inputs


def depend(spec: Spec, sizes: Sizes) -> bool:
    """Whether any input can be moved close to an intermediate value."""
    drawn, moved = draw_free(spec, sizes, 0), dependent(spec, sizes, 0)
    return any(not torch.equal(cast(drawn[n], torch.float64), cast(moved[n], torch.float64)) for n in drawn)


def _values(spec: Spec, inputs: Tensors, sizes: Sizes) -> list[Tensor]:
    return intermediates(spec.before or spec, {n: cast(t, torch.float64) for n, t in inputs.items()}, sizes)


def _near(tensor: TensorSpec, drawn: Tensor, value: Tensor, sizes: Sizes) -> Tensor | None:
    """A value for an input that is close to an intermediate ``value``; None if the shapes do not fit."""
    if tensor.dtype.startswith("int"):
        classes = tensor.bounds(sizes)[1] + 1
        return value.argmax(-1) if value.shape == (*drawn.shape, classes) else None
    alike = value.shape == drawn.shape and not torch.equal(value, drawn.double())
    return value if alike else None
