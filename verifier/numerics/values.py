"""Draw an input's typical values, as its ``init`` says, and tiny inputs for a trial of a reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.signature import DTYPES as FLOATS
from coda_agent.primitives.lang.signature import EIGHTS, INDICES
from coda_agent.verifier.spec.init import IGNORED_SHARE, Init
from coda_agent.verifier.spec.model import BadReference, Spec
from coda_agent.verifier.spec.parts import TensorSpec

Sizes = Mapping[str, int]
DTYPES = {name: torch_dtype(name) for name in (*FLOATS, *EIGHTS, *INDICES)}


ROUTINGS = ("balanced", "empty", "single", "one")


def values_of(
    init: Init, shape: list[int], sizes: Sizes, generator: torch.Generator, routing: str = "balanced"
) -> Tensor:
    """The values that ``init`` draws, before the cast to the input's dtype: fp64 for a geometric series,
    int64 for integers, otherwise fp32. ``routing``: how rows are assigned to experts, if the values are
    offsets."""
    device = generator.device
    if init.offsets is not None:
        return _offsets(init.range_at(sizes)[1], shape[0] - 1, generator, routing)
    if init.integers:
        low, high = init.range_at(sizes)
        values = torch.randint(low, high + 1, shape, generator=generator, device=device)
        if init.ignored is not None:
            share = torch.rand(shape, generator=generator, device=device)
            values.masked_fill_(share < IGNORED_SHARE, init.ignored)
        return _with_ends(values, low, high, generator)
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


def _offsets(rows: int, experts: int, generator: torch.Generator, routing: str) -> Tensor:
    """The first row of each expert, followed by the total number of rows. For "balanced", each row goes to a
    random expert. For "empty", each row goes to one of about half of the experts. For "single", one expert
    has just one row. For "one", one expert has all rows."""
    device = generator.device
    some, other = torch.randint(experts, (2,), generator=generator, device=device).tolist()
    drawn = torch.randint(experts, (rows,), generator=generator, device=device)
    if routing == "one":
        drawn.fill_(some)
    elif routing == "empty":
        drawn = torch.where(drawn % 2 == some % 2, drawn, some)
    elif routing == "single":
        drawn[drawn == some] = other if other != some else (some + 1) % experts
        drawn[0] = some
    ends = torch.bincount(drawn, minlength=experts).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])


def _with_ends(values: Tensor, low: int, high: int, generator: torch.Generator) -> Tensor:
    """Put both ends of an integer range somewhere among the values, if there are at least two values. A wrong
    comparison may affect only the first or last word of a vocabulary, and random draws hardly ever contain
    these two words."""
    half = values.numel() // 2
    if half:
        first, last = torch.randint(half, (2,), generator=generator, device=values.device).tolist()
        values.view(-1)[first], values.view(-1)[half + last] = low, high
    return values


def _spread(series: Tensor, shape: list[int]) -> Tensor:
    return series.expand(shape).contiguous() if shape else series[0].clone()


def trial(
    spec: Spec, times: Mapping[str, int] | None = None, typical: bool = False
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Tiny sizes, and inputs at these sizes. Each size is a different prime, multiplied by the dim's number
    in ``times`` (by default 2). So all sizes differ, and swapped dims are detected.

    Integers are drawn as ``init`` says. If ``init`` has an ``ignored`` value, the last entry (or row) has
    this value. All other inputs are fp64 in [0.5, 1.5), or as ``init`` says if ``typical``. For a backward,
    inputs that are results of the forward are not returned. Raises BadReference if a range of integers is
    empty at these sizes.
    """
    primes = [p for p in range(3, 400) if all(p % q for q in range(2, p))]
    numbers = dict(zip(spec.dims, primes, strict=False))
    sizes = {dim: n * (times or {}).get(dim, 2) for dim, n in numbers.items()}
    generator = torch.Generator().manual_seed(0)
    return sizes, {name: _trial_values(t, name, sizes, generator, typical) for name, t in spec.drawn.items()}


def _trial_values(
    tensor: TensorSpec, name: str, sizes: Sizes, generator: torch.Generator, typical: bool
) -> Tensor:
    shape = [d(sizes) for d in tensor.shape]
    if any(extent < 1 for extent in shape):
        message = (
            f"input {name!r} has shape {shape} at the tiny sizes of a trial; write it without differences"
        )
        raise BadReference(message, key="inputs")
    if tensor.dtype not in ("int32", "int64") and not typical:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    try:
        values = values_of(tensor.init, shape, sizes, generator)
    except ValueError as error:
        message = f"input {name!r}: {tensor.init.form} {error} at the tiny sizes of a trial; write it in dims"
        raise BadReference(message, key="inputs") from None
    if tensor.init.ignored is not None:
        values[-1] = tensor.init.ignored
    return values.to(DTYPES[tensor.dtype])
