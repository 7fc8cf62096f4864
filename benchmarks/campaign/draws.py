"""Draw inputs for the campaign's own check of mutants. The magnitudes cover each input's whole domain. The
sizes are small, or one dim is long.

This module shares no code with the verifier's draws, so that the campaign and the verifier have different
blind spots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.verifier.numerics.sizes import row_dims
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import OutputSpec, TensorSpec

WIDE = 16  # a dim stays small if it counts blocks of more than this many columns
SCALED = 90  # number of draws at other magnitudes
MODERATE, FAR = 5.0, 30.0  # values of x; a random magnitude is between 10**-x and 10**x
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Draw:
    """Inputs at given sizes. ``name``: how the inputs were drawn."""

    name: str
    sizes: Sizes
    inputs: dict[str, Tensor]


def draws(spec: Spec, seed: int) -> Iterator[Draw]:
    """All draws of a spec. The first draws follow the spec's own init at small sizes. The next draws have
    other magnitudes. In the last draws, each dim in turn is as long as in the largest case."""
    random = Random(f"{spec.name}/{seed}")
    for k in range(6):
        yield made(spec, small(spec, random), random, 0.0, f"init {k}")
    for k in range(SCALED):
        yield made(spec, small(spec, random), random, (0.0, 0.5, 1.0)[k % 3], f"scaled {k}")
    for dim in spec.dims:
        yield made(spec, long(spec, dim, random), random, 0.0, f"long {dim}")


def small(spec: Spec, random: Random) -> dict[str, int]:
    """Random sizes, at most a few dozen. Two thirds of the draws give static dims their sizes in one case of
    the spec, and one third gives them other sizes."""
    static = random.choice(spec.cases).sizes
    if spec.static and random.random() < 1 / 3:
        static = {dim: 4 * random.randint(1, 16) for dim in spec.static}
    few, rows = _few(spec), row_dims(spec)
    found = {}
    for dim in spec.dims:
        most = 4 if dim in few else 24 if dim in rows else 48
        found[dim] = static[dim] if dim in spec.static else random.randint(2 if dim in few else 6, most)
    return found


def long(spec: Spec, dim: str, random: Random) -> dict[str, int]:
    """Sizes at which ``dim`` is as long as in the largest case, and each other dim that is not static is at
    most 8."""
    static = {d: spec.cases[-1].sizes[d] for d in spec.static}
    found = {d: random.randint(1, 2) if static else random.randint(2, 8) for d in spec.dims} | static
    return found | {dim: max(case.sizes[dim] for case in spec.cases)} if dim not in static else found


def made(spec: Spec, sizes: Sizes, random: Random, share: float, name: str) -> Draw:
    """Inputs at ``sizes``. Each input ignores the spec's init with probability ``share``. If ``name``
    contains neither "init" nor "long", at least one random input ignores the init."""
    odd = {random.choice(list(spec.inputs))} if "init" not in name and "long" not in name else set[str]()
    odd |= {n for n in spec.inputs if random.random() < share}
    inputs = {n: one(t, sizes, random, n in odd) for n, t in spec.inputs.items()}
    return Draw(name, sizes, inputs)


def one(tensor: TensorSpec, sizes: Sizes, random: Random, odd: bool) -> Tensor:
    """Values of one input, in its dtype and within its domain. ``odd``: the values have a random magnitude
    and pattern instead of the spec's init."""
    generator = torch.Generator().manual_seed(random.getrandbits(48))
    values = usual(tensor, sizes, generator)
    if odd and tensor.init.offsets is None:
        values = random.choice(PATTERNS)(values, random, generator)
        low, high = tensor.bounds(sizes)
        if tensor.dtype.startswith("int"):
            values = _whole(tensor, low, high, values, random, generator)
        elif random.random() < 0.05:
            values = torch.full_like(values, random.choice((low, high)))
    return fitted(tensor, sizes, values)


def usual(tensor: TensorSpec, sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Values drawn by the spec's own init, in fp64. Integers and counts are uniform over their range."""
    shape, init = [d(sizes) for d in tensor.shape], tensor.init
    if init.offsets is not None:
        return _offsets(init.range_at(sizes)[1], shape[0] - 1, generator)
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


def _offsets(rows: int, experts: int, generator: torch.Generator) -> Tensor:
    """The offsets of the experts' first rows, and then the number of rows. The offsets take a random number
    of distinct values. If there are few distinct values, most experts have no rows."""
    places = torch.randint(0, rows + 1, (experts,), generator=generator)
    few = int(torch.randint(1, experts + 1, (), generator=generator))
    inner = places[torch.arange(experts - 1) % few].sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([rows])]).double()


def fitted(tensor: TensorSpec, sizes: Sizes, values: Tensor) -> Tensor:
    """Clip values to the input's domain; return them in the input's dtype."""
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
    """Values near one random value, which may be positive or negative."""
    near = _magnitude(random) * random.choice((-1, 1))
    spread = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    return near * (1 + random.choice((0.01, 0.3)) * spread)


def _wide(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """The values, each scaled by a random magnitude of its own. The magnitudes span three decades."""
    decades = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 3 - 3
    return values * _magnitude(random) * 10**decades


def _rows(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """The values, with each row scaled by one random factor."""
    if not values.dim():
        return values
    factors = torch.rand(values.shape[:1], generator=generator, dtype=torch.float64) * 4 - 2
    return values * (10**factors).reshape(-1, *[1] * (values.dim() - 1))


def _negated(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    return -values * random.choice((1.0, _magnitude(random)))


def _alike(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """The values without their signs, or one value everywhere, or zeros."""
    return random.choice((values.abs(), torch.full_like(values, _magnitude(random)), 0 * values))


def _steps(values: Tensor, random: Random, generator: torch.Generator) -> Tensor:
    """Small integers, whose products are exact."""
    return (2 * torch.randn(values.shape, generator=generator, dtype=torch.float64)).round()


Pattern = Callable[[Tensor, Random, torch.Generator], Tensor]
PATTERNS: tuple[Pattern, ...] = (_scaled, _scaled, _shifted, _shifted, _wide, _rows, _negated, _alike, _steps)


def _whole(
    tensor: TensorSpec, low: float, high: float, usual: Tensor, random: Random, generator: torch.Generator
) -> Tensor:
    """Integers in the domain. If the spec's init is ``integers``, as for target indices, the integers are
    uniform. Otherwise their logarithm is uniform up to a random limit."""
    if tensor.init.integers:
        unit = torch.rand(usual.shape, generator=generator, dtype=torch.float64)
        return (low + (high - low + 1) * unit).floor()
    most = math.log10(high + 1)
    decades = torch.rand(usual.shape, generator=generator, dtype=torch.float64)
    return 10 ** (decades * random.uniform(1, most)) - 1


def _few(spec: Spec) -> set[str]:
    """The dims that ``small`` makes very small, because they count heads, blocks of columns or experts."""
    tensors: list[TensorSpec | OutputSpec] = [*spec.inputs.values(), *spec.outputs.values()]
    terms = [term for t in tensors for d in t.shape for term in d.terms]
    heads = {n for m, times in terms if set(m) & set(spec.static) or times > WIDE for n in m}
    return heads.union(*(t.shape[0].names for t in spec.inputs.values() if t.init.offsets is not None))
