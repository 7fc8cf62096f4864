"""Inputs for a spec, drawn at a case's sizes in one of several families."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coda_agent.primitives.errors import InvalidInput
from coda_agent.verifier.numerics.reference import finished
from coda_agent.verifier.numerics.sizes import activation_dims
from coda_agent.verifier.numerics.stretch import STRETCHED, Typical, legal, stretched
from coda_agent.verifier.numerics.values import DTYPES, ROUTINGS, Sizes, values_of
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import TensorSpec


class _Drawn(NamedTuple):
    """One input that a family changes. ``values`` are drawn by a normal init with this ``std``, and not yet
    cast. ``activation``: whether the input is an activation (otherwise it is a weight). The generator
    ``rows`` gives all inputs of one draw the same random numbers; ``own`` gives each input different ones.
    """

    values: Tensor
    std: float
    activation: bool
    fp8: bool
    own: torch.Generator
    rows: torch.Generator


def _normal(of: _Drawn) -> Tensor:
    """Keep the values of the spec's init."""
    return of.values


def _positive(of: _Drawn) -> Tensor:
    """Make all values positive, so that sums grow with K. An accumulator of low precision would stop
    growing."""
    return of.values.abs_()


def _tiny(of: _Drawn) -> Tensor:
    """Multiply all values by 2**-10, because an eps of 1e-6 matters only for values this small. fp8 values
    are unchanged, because they would become zeros."""
    return of.values if of.fp8 else of.values.mul_(2.0**-10)


def _small(of: _Drawn) -> Tensor:
    """Multiply activations by 1e-2. Then additive terms of fixed size (a bias, an eps) dominate, and
    functions are nearly linear."""
    return of.values.mul_(1e-2) if of.activation else of.values


def _large(of: _Drawn) -> Tensor:
    """Multiply activations by 8. Then functions saturate, and the largest term dominates a sum of
    exponentials, without overflow."""
    return of.values.mul_(8.0) if of.activation else of.values


def _huge(of: _Drawn) -> Tensor:
    """Multiply activations by 40. Then exponentials overflow unless a maximum is subtracted first."""
    return of.values.mul_(40.0) if of.activation else of.values


def _outliers(of: _Drawn) -> Tensor:
    """Make an eighth of the activations' rows and of the weights' columns 30 to 100 times as large as the
    others. A kernel that scales per block instead of per row, or has too narrow a range, loses the small rows
    or columns. The large rows and columns keep the values of the family "normal", and the others are divided.
    So nothing overflows that does not overflow in the family "normal"."""
    length, generator = (of.values.shape[:1], of.rows) if of.activation else (of.values.shape[-1:], of.own)
    usual = _uniform(length, generator, 0.0, 1.0) > 1 / 8
    factors = _uniform(length, generator, 1 / 100, 1 / 30).where(usual, 1.0)
    return of.values.mul_(_over_rows(factors, of.values) if of.activation else factors)


def _zeros(of: _Drawn) -> Tensor:
    """Set an eighth of the activations' rows to zero. Scale another quarter of the rows to near sqrt(eps),
    where eps changes the result most."""
    if not of.activation or not of.values.dim():
        return of.values
    share = _uniform(of.values.shape[:1], of.rows, 0.0, 1.0)
    near = torch.exp2(_uniform(of.values.shape[:1], of.rows, -12.0, -8.0))
    return of.values.mul_(
        _over_rows(torch.where(share < 3 / 8, near, 1.0).where(share > 1 / 8, 0.0), of.values)
    )


def _low_rank(of: _Drawn) -> Tensor:
    """Replace matrices by matrices of rank 4 to 8, whose products have correlated errors. The values of the
    factors are bounded, since a product of several normals could exceed an exponential's range."""
    if of.values.dim() < 2:
        return of.values
    rank = int(torch.randint(4, 9, (), generator=of.own, device=of.values.device))
    *outer, rows, columns = of.values.shape
    left, right = (_uniform((*outer, n, rank), of.own, -(3**0.5), 3**0.5) for n in (rows, columns))
    return (left @ right.mT).mul_(of.std * rank**-0.5)


def _tails(of: _Drawn) -> Tensor:
    """Multiply an eighth of the activations' rows by 3, and all other rows by 1/4. Then some values reach the
    tail of an activation function, below -4, and few values are large enough to hide errors in the tail."""
    if not of.activation or not of.values.dim():
        return of.values
    many = _uniform(of.values.shape[:1], of.rows, 0.0, 1.0) < 1 / 8
    return of.values.mul_(_over_rows(torch.where(many, 3.0, 0.25), of.values))


def _spikes(of: _Drawn) -> Tensor:
    """In an eighth of the activations' rows, replace one value by a large one: 32 to 4096 times the usual
    size, with either sign. The residual streams of trained models have such values. A kernel that clamps, or
    has a narrow range, loses these values."""
    if not of.activation or not of.values.numel() or of.values.dim() < 2:
        return of.values
    rows = of.values.view(len(of.values), -1)
    many = _uniform(rows.shape[:1], of.rows, 0.0, 1.0) < 1 / 8
    at = torch.randint(rows.shape[1], (len(rows), 1), generator=of.own, device=rows.device)
    size = torch.exp2(_uniform(at.shape, of.own, 5.0, 12.0)).mul_(of.std)
    size = size.where(_uniform(at.shape, of.own, -1.0, 1.0) > 0, -size)
    rows.scatter_(1, at, size.where(many[:, None], rows.gather(1, at)))
    return of.values


def _negative(of: _Drawn) -> Tensor:
    """Make weights positive, and activations negative and 40 times as large, so that every result of a matmul
    is far below zero. Then a running maximum that starts at zero is wrong, and so is a sum of exponentials
    that counts a padding zero as exp(0)."""
    return of.values.abs_().mul_(-40.0 if of.activation else 1.0)


def _integers(of: _Drawn) -> Tensor:
    """Round to multiples of a power of two, and clamp to 8 times that power. fp8 inputs are clamped to 2
    times the power, because tensor cores keep fewer bits of fp8 sums. A matmul of such values, and sums and
    products of its results, are exact in fp32 in any order of summation. ``exactness.exact_outputs`` finds
    the outputs that must be exact to the bit."""
    steps = 1 if of.fp8 else 4
    unit = 2.0 ** round(math.log2(of.std)) / steps
    return of.values.div_(unit).round_().clamp_(-2 * steps, 2 * steps).mul_(unit)


# The families of inputs. Each family changes the inputs that have a normal init. Inputs with another init (a
# range, indices, a series) keep their values, because the operator relies on these values. The only
# exception: the family "integers" also rounds inputs with a uniform init to few values.
FAMILIES: dict[str, Callable[[_Drawn], Tensor]] = {
    "normal": _normal,
    "positive": _positive,
    "tiny": _tiny,
    "small": _small,
    "large": _large,
    "huge": _huge,
    "outliers": _outliers,
    "zeros": _zeros,
    "low_rank": _low_rank,
    "integers": _integers,
}


# Families that run only on a CPU. They test a program's mathematics, not its execution on a GPU.
ON_CPU: dict[str, Callable[[_Drawn], Tensor]] = {
    "tails": _tails,
    "spikes": _spikes,
    "negative": _negative,
    "repeated": _normal,  # but activations have only a few different rows, and vectors of integers few values
}
DISTINCT = 3  # the number of different rows in the family "repeated"


# The families that run on a GPU if the truth is quick to compute.
EVERY = (*FAMILIES, *STRETCHED)


def draw(
    spec: Spec, sizes: Sizes, seed: int, device: str | torch.device = "cpu", family: str = "normal"
) -> dict[str, Tensor]:
    """Draw inputs by name, in the spec's shapes and dtypes, on ``device``.

    The seed and an input's name determine its values on one kind of device; a GPU draws other values than a
    CPU. For a backward, the tensors that its forward stores are computed from the drawn inputs.
    """
    return finished(spec, draw_free(spec, sizes, seed, device, family), sizes)


def draw_free(
    spec: Spec, sizes: Sizes, seed: int, device: str | torch.device = "cpu", family: str = "normal"
) -> dict[str, Tensor]:
    """Like ``draw``, but for a backward draw only the forward's inputs and the incoming gradients."""
    known = (*EVERY, *ON_CPU)
    if family not in known:
        raise ValueError(f"family {family!r} is unknown; use one of {', '.join(known)}")
    rows = activation_dims(spec)
    drawn = {}
    for name, tensor in spec.drawn.items():
        try:
            drawn[name] = _draw(tensor, name, sizes, seed, device, family, rows)
        except ValueError as error:
            at = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
            raise InvalidInput(
                f"spec {spec.name}: input {name!r} cannot be drawn at {at}: {error}; give it a range "
                "that holds values at every size"
            ) from None
    return drawn


def _draw(
    tensor: TensorSpec,
    name: str,
    sizes: Sizes,
    seed: int,
    device: str | torch.device,
    family: str,
    rows: frozenset[str],
) -> Tensor:
    own, init = _generator(f"{seed}/{name}", device), tensor.init
    shape, dtype = [d(sizes) for d in tensor.shape], DTYPES[tensor.dtype]
    values = values_of(init, shape, sizes, own, routing(family))
    fp8 = dtype == torch.float8_e4m3fn
    if init.offsets is not None:
        return values.to(dtype)  # other integers would not be valid offsets
    of = _typical(tensor, values, sizes, own, seed)
    if family in STRETCHED:
        values = stretched(of, family)
    elif init.normal:
        shared = _generator(f"{seed}/", device)  # same for all inputs: their names are not in the seed
        values = (FAMILIES | ON_CPU)[family](
            _Drawn(values, init.normal.at(sizes), activation(tensor, rows), fp8, own, shared)
        )
    elif init.uniform and family == "integers":
        values = _on_grid(values, *init.uniform)
    if family == "repeated" and tensor.shape and (activation(tensor, rows) or not dtype.is_floating_point):
        shared = _generator(f"{seed}/", device)
        values = values[torch.randint(DISTINCT, shape[:1], generator=shared, device=device) % shape[0]]
    if family not in STRETCHED and tensor.domain != "finite" and dtype.is_floating_point:
        values = legal(of, values)
    # clamped first, because not every cast saturates
    return values.clamp_(-448.0, 448.0).to(dtype) if fp8 else values.to(dtype)


def activation(tensor: TensorSpec, rows: frozenset[str]) -> bool:
    """Whether an input is an activation: its first axis is one of ``rows``, if there are any."""
    return bool(tensor.shape) and (not rows or bool(tensor.shape[0].names & rows))


def routing(family: str) -> str:
    """How a family assigns rows to experts. The family "normal", which is timed, gives all experts about
    equally many rows. Some other families leave experts without rows, or give one expert a single row or all
    rows."""
    return ROUTINGS[(*EVERY, *ON_CPU).index(family) % len(ROUTINGS)]


def typical(tensor: TensorSpec, name: str, sizes: Sizes, seed: int) -> Typical:
    """Draw an input's typical values on a CPU. From the result, ``stretch`` computes the input's values
    beyond the typical ones."""
    own = _generator(f"{seed}/{name}", "cpu")
    values = values_of(tensor.init, [d(sizes) for d in tensor.shape], sizes, own)
    return _typical(tensor, values, sizes, own, seed)


def _typical(tensor: TensorSpec, values: Tensor, sizes: Sizes, own: torch.Generator, seed: int) -> Typical:
    low, high = tensor.bounds(sizes)
    ends = _inward(low, math.inf, DTYPES[tensor.dtype]), _inward(high, -math.inf, DTYPES[tensor.dtype])
    return Typical(values, tensor.init, tensor.dtype, *ends, own, seed)


def _inward(end: float, towards: float, dtype: torch.dtype) -> float:
    """The end of a domain, or the next value in its dtype if the end would be rounded to a value outside."""
    if not dtype.is_floating_point or dtype.itemsize == 1:  # nextafter takes neither integers nor fp8
        return end
    at = torch.tensor(end, dtype=dtype)
    outside = float(at) < end if towards > 0 else float(at) > end
    return float(at.nextafter(torch.tensor(towards, dtype=dtype)) if outside else at)


def _generator(stream: str, device: str | torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:7], "little")
    return torch.Generator(device).manual_seed(seed)


def _uniform(shape: Sequence[int], generator: torch.Generator, low: float, high: float) -> Tensor:
    return torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)


def _over_rows(factors: Tensor, values: Tensor) -> Tensor:
    return factors.reshape(-1, *[1] * (values.dim() - 1))


def _on_grid(values: Tensor, low: float, high: float) -> Tensor:
    """Round values of a range to powers of two, because division by a power of two is exact. If the range is
    not positive, or contains fewer than two powers of two, round to multiples of one power of two. This power
    is chosen so that the range contains 8 to 16 multiples."""
    if low > 0 and (most := math.floor(math.log2(high))) > (least := math.ceil(math.log2(low))):
        return values.log2_().round_().clamp_(least, most).exp2_()
    unit = 2.0 ** math.floor(math.log2((high - low) / 8))
    return values.div_(unit).round_().clamp_(math.ceil(low / unit), math.floor(high / unit)).mul_(unit)
