"""Search for inputs that test the untested sides of a program's choices. For example, the sides of the choice
``maximum`` are its two operands.

Draws are independent. Each input is typical, stretched (beyond its typical values), or near a constant of the
program; at most one input is scaled much further. In some draws only the first column of each matrix is
nonzero, so that each value of a matmul is a single product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from torch import Tensor

from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.numerics.inputs import typical
from coda_agent.verifier.numerics.sizes import hidden
from coda_agent.verifier.numerics.stretch import SEARCHED, STRETCHED, Typical, far, legal, near
from coda_agent.verifier.numerics.values import DTYPES, Sizes
from coda_agent.verifier.spec.model import Spec

SEARCHES = 160  # number of draws
DRAWS_A_SIZE = 8
LARGEST = 32  # the largest extent of a tensor's axis


def searches(
    spec: Spec, program: Program, seed: int
) -> Iterator[tuple[dict[str, int], int, dict[str, Tensor]]]:
    """Yield sizes, a seed, and the inputs that this seed draws at these sizes."""
    random, numbers = Random(seed), _numbers(program)
    for _ in range(SEARCHES // DRAWS_A_SIZE):
        sizes = hidden(spec, random.getrandbits(48), LARGEST)
        for _ in range(DRAWS_A_SIZE):
            drawn = random.getrandbits(48)
            yield sizes, drawn, search(spec, sizes, drawn, numbers)


def search(spec: Spec, sizes: Sizes, seed: int, numbers: Sequence[float]) -> dict[str, Tensor]:
    """One draw of the search: legal inputs in the spec's dtypes."""
    random = Random(f"{seed}/{SEARCHED}")
    single = random.random() < 1 / 3
    farthest = random.choice([*spec.drawn, None])
    ways: dict[str, Callable[[Typical], Tensor]] = STRETCHED | {
        "typical": lambda of: of.values,
        "near": lambda of: near(of, numbers),
    }
    inputs = {}
    for name, tensor in spec.drawn.items():
        if tensor.init.offsets is not None:
            inputs[name] = typical(tensor, name, sizes, seed).values.to(DTYPES[tensor.dtype])
            continue
        of, way = typical(tensor, name, sizes, seed), random.choice(list(ways))
        values = far(of) if name == farthest else ways[way](of)
        if single and values.dim() > 1:
            values = values.clone()
            values[..., 1:] = 0
        inputs[name] = legal(of, values).to(DTYPES[tensor.dtype])
    return inputs


def _numbers(program: Program) -> list[float]:
    """The absolute values of a program's constants, and 1."""
    named = {
        float(n.attribute) for n in program.nodes if n.op == "constant" and isinstance(n.attribute, float)
    }
    return [1.0, *sorted(abs(number) for number in named if number)]
