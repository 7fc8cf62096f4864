"""Inputs for the campaign's own check: magnitudes over each input's whole domain, small and long sizes.

Shares no code with the verifier's draws, so that the two miss different errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.verifier.numerics.sizes import row_dims
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import OutputSpec, TensorSpec

SCALED = 90  # draws at other magnitudes
MODERATE, FAR = 5.0, 30.0  # decades
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Draw:
    """Inputs at given sizes; ``name`` says how they were drawn."""

    name: str
    sizes: Sizes
    inputs: dict[str, Tensor]


def draws(spec: Spec, seed: int) -> Iterator[Draw]:
    """Draws with the spec's own init at small sizes, at other magnitudes, and with each dim as long as in the
    largest case."""
    random = Random(f"{spec.name}/{seed}")
    for k in range(6):
        yield made(spec, small(spec, random), random, 0.0, f"init {k}")
    for k in range(SCALED):
        yield made(spec, small(spec, random), random, (0.0, 0.5, 1.0)[k % 3], f"scaled {k}")
    for dim in spec.dims:
        yield made(spec, long(spec, dim, random), random, 0.0, f"long {dim}")


def small(spec: Spec, random: Random) -> dict[str, int]:
    """Sizes of a few dozen at most; static dims come from a case."""
    static = random.choice(spec.cases).sizes
    heads = {n for d in _extents(spec) for m, _ in d.terms if set(m) & set(spec.static) for n in m}
    rows = row_dims(spec)
    found = {}
    for dim in spec.dims:
        most = 4 if dim in heads else 24 if dim in rows else 48
        found[dim] = static[dim] if dim in spec.static else random.randint(2 if dim in heads else 6, most)
    return found


def long(spec: Spec, dim: str, random: Random) -> dict[str, int]:
    """Sizes with one dim as long as in any case and a handful for the others."""
    static = {d: spec.cases[-1].sizes[d] for d in spec.static}
    found = {d: random.randint(1, 2) if static else random.randint(2, 8) for d in spec.dims} | static
    return found | {dim: max(case.sizes[dim] for case in spec.cases)} if dim not in static else found


def made(spec: Spec, sizes: Sizes, random: Random, share: float, name: str) -> Draw:
    """Inputs at ``sizes``. One input, and a share of the others, ignore the spec's init; with share 0 all
    follow it."""
    odd = {random.choice(list(spec.inputs))} if "init" not in name and "long" not in name else set[str]()
    odd |= {n for n in spec.inputs if random.random() < share}
    inputs = {n: one(t, sizes, random, n in odd) for n, t in spec.inputs.items()}
    return Draw(name, sizes, inputs)


def one(tensor: TensorSpec, sizes: Sizes, random: Random, odd: bool) -> Tensor:
    """Values of one input, in its dtype and within its domain. ``odd``: of any magnitude and pattern."""
    generator = torch.Generator().manual_seed(random.getrandbits(48))
    values = usual(tensor, sizes, generator)
    if odd:
        values = random.choice(PATTERNS)(values, random, generator)
        low, high = tensor.bounds(sizes)
        if tensor.dtype.startswith("int"):
            values = _whole(tensor, low, high, values, random, generator)
        elif random.random() < 0.05:
            values = torch.full_like(values, random.choice((low, high)))
    return fitted(tensor, sizes, values)


def usual(tensor: TensorSpec, sizes: Sizes, generator: torch.Generator) -> Tensor:
    """The spec's own init in fp64; for a count, any of its values."""
    shape, init = [d(sizes) for d in tensor.shape], tensor.init
    if init.integers or init.count is not None:
        low, high = init.range_at(sizes)
        values = torch.randint(low, high + 1, shape, generator=generator).double()
        if init.ignored is not None:
            values[torch.rand(shape, generator=generator) < 0.2] = float(init.ignored)
        return values
    unit = torch.rand(shape, generator=generator, dtype=torch.float64)
    if init.uniform:
        low_end, high_end = init.uniform
        return low_end + (high_end - low_end) * unit
    if init.geometric:
        first, last = init.geometric
        steps = torch.arange(n := shape[-1], dtype=torch.float64) / n
        return (first * (last / first) ** steps).expand(shape).clone()
    std = init.normal.at(sizes) if init.normal else 1.0
    return std * torch.randn(shape, generator=generator, dtype=torch.float64)


def fitted(tensor: TensorSpec, sizes: Sizes, values: Tensor) -> Tensor:
    """Values clipped to the domain, in the input's dtype."""
    low, high = tensor.bounds(sizes)
    if low >= 0:
        values = values.abs()
    dtype = torch_dtype(tensor.dtype)
    if not dtype.is_floating_point:
        whole, ignored = values.round().clamp(low, high), tensor.init.ignored
        return (whole if ignored is None else whole.where(values != ignored, ignored)).to(dtype)
    return values.nan_to_num(0.0).clamp(low, high).to(dtype)


def _magnitude(random: Random) -> float:
    most = FAR if random.random() < 0.2 else MODERATE
    return 10.0 ** random.uniform(-most, most)


def _scaled(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    return values * _magnitude(random)


def _shifted(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """Values near one value of either sign."""
    near = _magnitude(random) * random.choice((-1, 1))
    spread = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return near * (1 + random.choice((0.01, 0.3)) * spread)


def _wide(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """Independent magnitudes over three decades."""
    decades = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 3 - 3
    return values * _magnitude(random) * 10**decades


def _rows(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """One magnitude per row."""
    if not values.dim():
        return values
    factors = torch.rand(values.shape[:1], generator=generator, dtype=torch.float64) * 4 - 2
    return values * (10**factors).reshape(-1, *[1] * (values.dim() - 1))


def _negated(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    return -values * random.choice((1.0, _magnitude(random)))


def _alike(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """Equal magnitudes, or one value everywhere, or zeros."""
    return random.choice((values.abs(), torch.full_like(values, _magnitude(random)), 0 * values))


def _steps(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """Small integers, whose products are exact."""
    return (2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)).round()


Pattern = Callable[[Tensor, Random, torch.Generator], Tensor]
PATTERNS: tuple[Pattern, ...] = (_scaled, _scaled, _shifted, _shifted, _wide, _rows, _negated, _alike, _steps)


def _whole(
    tensor: TensorSpec, low: float, high: float, usual: Tensor, random: Random, generator: torch.Generator
) -> Tensor:
    """Integers of any magnitude in the domain; target indices are often all equal."""
    if tensor.init.integers:
        unit = torch.rand(usual.shape, generator=generator, dtype=torch.float64)
        return (low + (high - low + 1) * unit).floor()
    most = math.log10(high + 1)
    decades = torch.rand(usual.shape, generator=generator, dtype=torch.float64)
    return 10 ** (decades * random.uniform(1, most)) - 1


def _extents(spec: Spec) -> list[Dim]:
    tensors: list[TensorSpec | OutputSpec] = [*spec.inputs.values(), *spec.outputs.values()]
    return [d for t in tensors for d in t.shape]
