"""Inputs for a spec: drawn at a case's sizes in one of a few families, or tiny ones to try a reference on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from primitives.interpret import torch_dtype
from primitives.ir import DTYPES as FLOATS
from primitives.ir import INDICES, OPERANDS
from verifier.spec import BadReference, Spec, TensorSpec
from verifier.spec_init import IGNORED_SHARE, Init

Sizes = Mapping[str, int]
DTYPES = {name: torch_dtype(name) for name in (*FLOATS, *OPERANDS, *INDICES)}

#: How inputs may be drawn. "normal" is the spec's own init. "positive" takes magnitudes, so that sums grow
#: with K and a low-precision accumulator stalls. "tiny" scales normal inputs by 2**-10: only there does
#: an eps of 1e-6 matter; fp8 stays, which would become zeros. Every other init is one the operator
#: relies on (a range, indices, a series), and stays.
FAMILIES = ("normal", "positive", "tiny")


def draw(
    spec: Spec, sizes: Sizes, seed: int, device: str | torch.device = "cpu", family: str = "normal"
) -> dict[str, Tensor]:
    """Inputs by name, in the spec's shapes and dtypes, on ``device``.

    A seed and an input's name fix its values on one kind of device (a GPU draws other ones than a CPU).
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; use one of {', '.join(FAMILIES)}")
    return {name: _draw(t, name, sizes, seed, device, family) for name, t in spec.inputs.items()}


def _draw(
    tensor: TensorSpec, name: str, sizes: Sizes, seed: int, device: str | torch.device, family: str
) -> Tensor:
    stream = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
    generator = torch.Generator(device).manual_seed(stream)
    shape, dtype = [d(sizes) for d in tensor.shape], DTYPES[tensor.dtype]
    values = _values(tensor.init, shape, sizes, generator)
    if tensor.init.normal and family == "positive":
        values.abs_()
    if dtype == torch.float8_e4m3fn:
        return values.clamp_(-448.0, 448.0).to(dtype)  # its largest, to which not every cast saturates
    if tensor.init.normal and family == "tiny":
        values.mul_(2.0**-10)
    return values.to(dtype)


def _values(init: Init, shape: list[int], sizes: Sizes, generator: torch.Generator) -> Tensor:
    """The init's values before they are cast: fp32, fp64 for a series, int64 for integers."""
    device = generator.device
    if init.integers:
        low, high = init.range_at(sizes)
        values = torch.randint(low, high + 1, shape, generator=generator, device=device)
        if init.ignored is not None:
            share = torch.rand(shape, generator=generator, device=device)
            values.masked_fill_(share < IGNORED_SHARE, init.ignored)
        return values
    if init.count is not None:
        period = init.range_at(sizes)[1] + 1
        rows = torch.arange(shape[0] if shape else 1, device=device) % period
        return _spread(rows.reshape(-1, *[1] * (len(shape) - 1)), shape)
    if init.geometric:
        low_end, high_end = init.geometric
        steps = torch.arange(n := shape[-1] if shape else 1, device=device, dtype=torch.float64) / n
        return _spread(low_end * (high_end / low_end) ** steps, shape)
    values = torch.empty(shape, device=device)
    if init.uniform:
        return values.uniform_(*init.uniform, generator=generator)
    return values.normal_(std=init.normal.at(sizes) if init.normal else 1.0, generator=generator)


def _spread(series: Tensor, shape: list[int]) -> Tensor:
    return series.expand(shape).contiguous() if shape else series[0].clone()


def trial(spec: Spec) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Tiny sizes, even and distinct so that no mistake hides in equal numbers, and inputs there.

    Integers are drawn as the spec says, one of them ``ignored`` where it has such a value; all else is
    fp64 in [0.5, 1.5). BadReference where the range of integers is empty at such sizes.
    """
    primes = [p for p in range(3, 400) if all(p % q for q in range(2, p))]
    sizes = {dim: 2 * prime for dim, prime in zip(spec.dims, primes, strict=False)}
    generator = torch.Generator().manual_seed(0)
    return sizes, {name: _tried(t, name, sizes, generator) for name, t in spec.inputs.items()}


def _tried(tensor: TensorSpec, name: str, sizes: Sizes, generator: torch.Generator) -> Tensor:
    shape = [d(sizes) for d in tensor.shape]
    if tensor.dtype not in ("int32", "int64"):
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    try:
        values = _values(tensor.init, shape, sizes, generator)
    except ValueError as error:
        message = f"input {name!r}: {tensor.init.form} {error} at the tiny sizes of a trial; write it in dims"
        raise BadReference(message, key="inputs") from None
    if tensor.init.ignored is not None:
        values[-1] = tensor.init.ignored
    return values.to(DTYPES[tensor.dtype])
