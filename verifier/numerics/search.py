"""Search for inputs that test the untested sides of a program's choices. For example, the sides of the choice
``maximum`` are its two operands.

Draws are independent. Each input is typical, stretched (beyond its typical values), or near a constant of the
program; at most one input is scaled much further. In some draws only the first column of each matrix is
nonzero, so that each value of a matmul is a single product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

from torch import Tensor

from coda_agent.verifier.numerics.inputs import typical
from coda_agent.verifier.numerics.stretch import SEARCHED, STRETCHED, Typical, far, legal, near
from coda_agent.verifier.numerics.values import DTYPES, Sizes
from coda_agent.verifier.spec.model import Spec

SEARCHES = 160  # number of draws
DRAWS_A_SIZE = 8
LARGEST = 32  # the largest extent of a tensor's axis


def search(spec: Spec, sizes: Sizes, seed: int, near_to: Mapping[str, Sequence[float]]) -> dict[str, Tensor]:
    """One draw of the search: legal inputs in the spec's dtypes. ``near_to``: for each input, numbers near
    which it may be drawn."""
    random = Random(f"{seed}/{SEARCHED}")
    single = random.random() < 1 / 3
    farthest = random.choice([*spec.drawn, None])
    inputs = {}
    for name, tensor in spec.drawn.items():
        if tensor.init.offsets is not None:
            inputs[name] = typical(tensor, name, sizes, seed).values.to(DTYPES[tensor.dtype])
            continue
        ways: dict[str, Callable[[Typical], Tensor]] = STRETCHED | {
            "typical": lambda of: of.values,
            "near": partial(near, numbers=near_to[name]),
        }
        of, way = typical(tensor, name, sizes, seed), random.choice(list(ways))
        values = far(of) if name == farthest else ways[way](of)
        if single and values.dim() > 1:
            values = values.clone()
            values[..., 1:] = 0
        inputs[name] = legal(of, values).to(DTYPES[tensor.dtype])
    return inputs
