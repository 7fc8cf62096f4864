"""Values of inputs at which a program may behave unlike everywhere else.

A factor such as ``1 + 1e-4 / ((eps - 1e-5) / 1e-9)**2`` is a smooth bump: it is 1 except near one value of
``eps``, which random draws never meet. So each input also takes the ends of its ``init``, round numbers, and
the values at which a subexpression of the program is zero, has a pole, or comes closest to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.verifier.numerics.inputs import draw, draw_free, typical
from coda_agent.verifier.numerics.reference import Tensors
from coda_agent.verifier.numerics.sizes import hidden, stretched
from coda_agent.verifier.numerics.stretch import legal
from coda_agent.verifier.numerics.values import DTYPES, Sizes
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import TensorSpec

LARGEST = 48  # the largest extent of a tensor's axis in most runs
BASES = ("normal", "tiny")  # the families of the other inputs: an eps matters only beside tiny values
ROUND = sorted({2.0**k for k in range(-20, 21)} | {10.0**k for k in range(-12, 7)})
WITHIN = 2.0**10  # round numbers are tried within this factor of an input's typical magnitude
SAMPLES = 1024  # number of values at which subexpressions are computed, on a grid and in octaves each
PER_NODE = 8  # the most values that one subexpression gives
MOST = 24  # the most zeros of subexpressions to try for one input, each in a run of its own
AT_ONCE = 12  # round numbers that a vector or matrix takes in one run; a scalar takes one
ALIKE = 1e-12  # relative difference up to which two values of a subexpression are alike
STEPS = 64  # halvings of an interval
# operations that only arrange values
ARRANGING = ("per_row", "per_column", "per_head", "even", "odd", "column_range", "as_tile")


class At(NamedTuple):
    """Sizes, and for one or more inputs the values to draw."""

    sizes: dict[str, int]
    near: dict[str, tuple[float, ...]]


def near_values(
    spec: Spec, sizes: Sizes, seed: int, near: Mapping[str, Sequence[float]]
) -> dict[str, Tensor]:
    """Draw inputs of which those in ``near`` take only these values, if they are legal. A vector or matrix
    takes each of them about equally often."""
    inputs = draw_free(spec, sizes, seed, family=BASES[seed % len(BASES)])
    for name, numbers in near.items():
        of = typical(spec.drawn[name], name, sizes, seed)
        known = [number for number in numbers if of.low <= number <= of.high]
        if not known:
            continue
        turns = torch.randperm(of.values.numel(), generator=of.own) % len(known)
        chosen = torch.tensor(known, dtype=torch.float64)[turns].reshape(of.values.shape)
        inputs[name] = legal(of, chosen).to(DTYPES[spec.drawn[name].dtype])
    return inputs


def places(spec: Spec, program: Program, seed: int) -> Iterator[At]:
    """Yield sizes, and the values of inputs to try there. An index may reach its values only where a dim is
    as long as in a case."""
    random, read = Random(seed), _read_by_value(program)
    small = hidden(spec, random.getrandbits(48), LARGEST, vary=True)
    cases = [case.sizes for case in spec.cases]
    others = draw(spec, small, random.getrandbits(48))
    every: dict[str, tuple[float, ...]] = {}
    for name, tensor in spec.drawn.items():
        if name not in read:
            continue
        largest = max(cases, key=lambda sizes: tensor.bounds(sizes)[1])
        zeros = roots(spec, program, name, largest, others, random)
        numbers = _numbers(tensor, small)
        legal_here = [z for z in zeros if _inside(tensor, small, z)]
        # values of like magnitude, because the gate judges small values beside large ones
        numbers.sort(key=abs)
        at_once = AT_ONCE if tensor.shape else 1
        chunks: list[tuple[float, ...]] = [(z,) for z in legal_here[:MOST]]
        chunks += [tuple(numbers[i : i + at_once]) for i in range(0, len(numbers), at_once)]
        for chunk in chunks:
            yield At(small, {name: chunk})
        every[name] = tuple(random.sample([*legal_here, *numbers], min(AT_ONCE, len(legal_here + numbers))))
        if far := [z for z in zeros if z not in legal_here]:
            for sizes in stretched(spec, random.getrandbits(48)):
                if reached := tuple(z for z in far if _inside(tensor, sizes, z)):
                    yield At(sizes, {name: reached})
                    break
    yield At(small, every)


def _read_by_value(program: Program) -> set[str]:
    """The names of the inputs that more than matmuls read."""
    nodes = [a for node in program.nodes if node.op not in ("gemm", "transpose") for a in node.args]
    return {str(program.nodes[a].attribute) for a in nodes if program.nodes[a].op == "input"}


def _inside(tensor: TensorSpec, sizes: Sizes, number: float) -> bool:
    low, high = tensor.bounds(sizes)
    return low <= number <= high


def _numbers(tensor: TensorSpec, sizes: Sizes) -> list[float]:
    """The ends of an input's typical values, and the legal round numbers near its typical magnitude."""
    low, high = tensor.init.span_at(sizes)
    size = max(abs(low), abs(high))
    least = 1.0 if tensor.dtype.startswith("int") else size / WITHIN
    rounds = [sign * n for n in ROUND if least <= n <= size * WITHIN for sign in (1, -1)]
    if tensor.dtype.startswith("int"):
        rounds = [n for n in rounds if n == int(n)]
    return [n for n in dict.fromkeys((low, high, 0.0, *rounds)) if _inside(tensor, sizes, n)]


def roots(
    spec: Spec, program: Program, name: str, sizes: Sizes, others: Tensors, random: Random
) -> list[float]:
    """The legal values of an input at which a subexpression of the program is zero, has a pole, or comes
    closest to zero. These are subexpressions of the input's own value, sizes and constants; ``others`` gives
    each other input one value."""
    tensor = spec.drawn[name]
    evaluate = partial(_subexpressions, program, name, sizes, others)
    samples, brackets = _samples(tensor, sizes), []
    for node, values in evaluate(samples).items():
        size, sign = values.abs().nan_to_num(math.inf), values.sign()
        crossed = (sign[1:] * sign[:-1] < 0).nonzero().flatten().tolist()
        beside = torch.minimum(size[:-2], size[2:]) * (1 - ALIKE)
        lowest = (size[1:-1] < beside).nonzero().flatten().tolist()
        every = [_Bracket(node, float(samples[i]), float(samples[i + 1]), True) for i in crossed]
        every += [_Bracket(node, float(samples[i]), float(samples[i + 2]), False) for i in lowest]
        brackets += random.sample(every, min(PER_NODE, len(every)))
    found = _narrowed(evaluate, brackets)
    found = found.round() if tensor.dtype.startswith("int") else found.float().double()
    return [number for number in dict.fromkeys(found.tolist()) if _inside(tensor, sizes, number)]


class _Bracket(NamedTuple):
    """An interval in which a node's value changes its sign (``crosses``), or its magnitude is least."""

    node: int
    low: float
    high: float
    crosses: bool


def _samples(tensor: TensorSpec, sizes: Sizes) -> Tensor:
    """Legal values of an input in rising order: every octave, and grids over the typical values and over the
    domain."""
    low, high = tensor.bounds(sizes)
    octaves = torch.exp2(torch.linspace(-60.0, 60.0, SAMPLES, dtype=torch.float64))
    first, last = tensor.init.span_at(sizes)
    spans = [
        torch.linspace(a, b, SAMPLES + 1, dtype=torch.float64)
        for a, b in ((2 * first, 2 * last), (low, high))
    ]
    every = torch.cat([octaves, -octaves, *spans, torch.tensor([low, high], dtype=torch.float64)])
    if tensor.dtype.startswith("int"):
        every = every.round()
    return every[(every >= low) & (every <= high)].unique()


def _narrowed(evaluate: Callable[[Tensor], dict[int, Tensor]], brackets: Sequence[_Bracket]) -> Tensor:
    """The point in each bracket at which the sign changes or the magnitude is least."""
    low, high = (torch.tensor([b[i] for b in brackets], dtype=torch.float64) for i in (1, 2))
    crosses = torch.tensor([b.crosses for b in brackets], dtype=torch.bool)

    def at(points: Tensor) -> Tensor:
        values = evaluate(points)
        return torch.stack([values[b.node][i] for i, b in enumerate(brackets)])

    sign = at(low).sign() if brackets else low
    for _ in range(STEPS if brackets else 0):
        left, middle, right = (low + (high - low) * part for part in (1 / 3, 1 / 2, 2 / 3))
        before, falls = at(middle).sign() == sign, at(left).abs() > at(right).abs()
        low = torch.where(crosses, middle.where(before, low), left.where(falls, low))
        high = torch.where(crosses, high.where(before, middle), high.where(falls, right))
    return (low + high) / 2


def _subexpressions(
    program: Program, name: str, sizes: Sizes, others: Tensors, points: Tensor
) -> dict[int, Tensor]:
    """The values of the nodes that depend on an input's single value alone, at each of these points."""
    known: dict[int, Tensor] = {}
    depends: set[int] = set()
    for index, node in enumerate(program.nodes):
        operation, arguments = OPERATIONS[node.op], node.args[: 1 if node.op in ARRANGING else None]
        if node.op == "input":
            own = node.attribute == name
            known[index] = (
                points if own else others[str(node.attribute)].double().flatten()[0].expand_as(points)
            )
            depends |= {index} if own else set()
        elif node.op == "constant":
            known[index] = torch.full_like(points, float(node.attribute or 0))
        elif node.op == "dim":
            known[index] = torch.full_like(points, Dim.parse(str(node.attribute))(sizes))
        elif arguments and known.keys() >= set(arguments) and (operation.cute or node.op in ARRANGING):
            values = [known[a] for a in arguments]
            made = (
                values[0] if node.op in ARRANGING or not operation.torch else operation.torch(torch, *values)
            )
            known[index] = made.to(points.dtype)
            depends |= {index} if depends & set(arguments) else set()
    return {index: known[index] for index in depends}
