"""Judge a proposed primitive's outputs. Choose the points at which the frame runs, and limit the errors at
these points. The frame is a toy kernel that applies the primitive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from coda_agent.verifier.gates import Failed
from coda_agent.verifier.proposals.proposal import LARGEST, SIZE, SIZES, Proposal, uniform, usual_range
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from torch import Tensor

ULP = 2.0**-23
BACKWARD = 2 * ULP  # the truth may be evaluated at an argument within this relative distance of the point
TINY = 2.0**-126  # the smallest normal number of fp32
FLUSHED = 2.0**-100  # a smaller result may become zero, for example the reciprocal of the largest number
FAMILIES = ("usual", "wide", "edges", "accumulator")


def draw(proposal: Proposal, family: str, seed: int) -> dict[str, Tensor]:
    """Draw the frame's inputs from a family of points. Points at which the reference is undefined (NaN) are
    replaced by usual values."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    usual = [uniform(usual_range(proposal.interval(a)), generator) for a in proposal.arguments]
    left = torch.zeros(SIZE, SIZE)
    tiles = usual
    if family == "wide":
        tiles = [
            _wide(proposal.interval(a), u, generator) for a, u in zip(proposal.arguments, usual, strict=True)
        ]
    elif family == "edges":
        grid = list(product(*(_edges(proposal.interval(a)) for a in proposal.arguments)))
        chosen = torch.tensor(grid, dtype=torch.float32).repeat(-(-SIZE * SIZE // len(grid)), 1)[
            : SIZE * SIZE
        ]
        tiles = [column.reshape(SIZE, SIZE) for column in chosen.unbind(1)]
    elif family == "accumulator":
        low, high = proposal.interval(proposal.arguments[0])
        every = torch.arange(SIZE * SIZE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
        inside = every.isfinite() & (every >= low) & (every <= high) & ((every == 0) | (every.abs() >= TINY))
        if bool(inside.any()):
            few = every[inside].repeat(-(-SIZE * SIZE // int(inside.sum())))[: SIZE * SIZE]
            left, tiles = few.reshape(SIZE, SIZE), [torch.zeros(SIZE, SIZE), *usual[1:]]
    met = [left + tiles[0], *tiles[1:]]
    undefined = proposal.truth(*(t.double() for t in met)).isnan()
    if family == "accumulator":
        left = left.where(~undefined, left[~undefined][0])
    else:
        tiles = [t.where(~undefined, u) for t, u in zip(tiles, usual, strict=True)]
    right = torch.eye(SIZE)
    named = dict(zip(proposal.arguments, tiles, strict=True))
    return {"left": left.bfloat16(), "right": right.bfloat16()} | named


def _wide(interval: tuple[float, float], usual: Tensor, generator: Any) -> Tensor:
    """Draw fp32 numbers of all magnitudes within the interval."""
    import torch

    low, high = interval
    largest = min(LARGEST, max(abs(low), abs(high)))
    exponents = torch.rand(SIZE, SIZE, generator=generator, dtype=torch.float64)
    magnitudes = torch.exp2(-126 + exponents * (math.log2(largest) + 126))
    signs = torch.randint(0, 2, (SIZE, SIZE), generator=generator) * 2 - 1
    drawn = (magnitudes * signs).float()
    return drawn.where((drawn >= low) & (drawn <= high) & drawn.isfinite(), usual)


def _edges(interval: tuple[float, float]) -> list[float]:
    """List the interval's special points: zeros, denormals, powers of two, large numbers, infinities, and the
    interval's ends with neighbouring numbers."""
    import torch

    low, high = (torch.tensor(end, dtype=torch.float32) for end in interval)
    ends = [low, torch.nextafter(low, high), torch.nextafter(high, low), high]
    sizes = [
        0.0, 2.0**-149, TINY / 2, TINY, 2.0**-64, ULP, 1e-4, 0.5, 1.0, 1 + ULP, 2.0, 10.0, 88.0, 104.0,
        2.0**24, 2.0**64, LARGEST, math.inf,
    ]  # fmt: skip
    every = [s for size in sizes for s in (size, -size)] + [float(e) for e in ends]
    return [e for e in every if float(low) <= e <= float(high)]


def errors_of(
    proposal: Proposal, spec: Spec, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], where: str
) -> dict[str, float]:
    """Judge the frame's outputs against fp64, on the tensors' device; return their errors. Raises Failed."""
    from coda_agent.verifier.numerics import error_gate, reference

    fused = spec.model_copy(update={"outputs": {"fused": spec.outputs["fused"]}})
    truth, yard = (f(spec, inputs, SIZES) for f in (reference.oracle, reference.yardstick))
    (error,) = error_gate.compare(fused, outputs, truth, yard)
    if not error.passed:
        raise Failed("numerics", f"{where}, rounded to bf16: {error.reason}", outputs=[error.model_dump()])
    found = {"fused": round(error.rms_ratio, 3)}
    if "loaded" in outputs:
        found["ulps"] = _pointwise(
            proposal, [inputs[a] for a in proposal.arguments], outputs["loaded"], where
        )
    return found


def _pointwise(proposal: Proposal, arguments: Sequence[Tensor], got: Tensor, where: str) -> float:
    """Return the exact function's largest error over all points, in ulps. First subtract from each error the
    part that a rounding of the arguments can explain. Raises Failed if the largest error exceeds the
    proposal's bound."""
    import torch

    wide = [a.double() for a in arguments]
    truth = proposal.truth(*wide)
    slack = torch.full_like(truth, FLUSHED)
    for i, (name, value) in enumerate(zip(proposal.arguments, wide, strict=True)):
        low, high = proposal.interval(name)
        moved = [(value * (1 + by)).clamp(low, high) for by in (BACKWARD, -BACKWARD)]
        near = [(proposal.truth(*wide[:i], m, *wide[i + 1 :]) - truth).abs() for m in moved]
        slack += torch.maximum(*near).nan_to_num(0.0, 0.0, 0.0)
    unit = torch.exp2(torch.frexp(truth.abs().clamp(TINY, LARGEST))[1].double() - 24)
    off = ((got.double() - truth).abs() - slack).clamp(min=0) / unit
    overflown = (truth.abs() + slack + proposal.ulps * unit > LARGEST) & (
        got.double() == truth.sign() * math.inf
    )
    alike = (got == truth.float()) | (got.isnan() & truth.isnan()) | overflown
    off = off.where(~alike, 0.0).nan_to_num(math.inf, math.inf)
    worst = float(off.max())
    if worst > proposal.ulps:
        at = int(off.flatten().argmax())
        values = zip(proposal.arguments, arguments, strict=True)
        place = ", ".join(f"{name} = {float(a.flatten()[at]):.9g}" for name, a in values)
        wrong = int((off > proposal.ulps).sum())
        raise Failed(
            "numerics",
            f"{where}, {proposal.name} in fp32: at {place} it gives {float(got.flatten()[at]):.9g}, the "
            f"truth is {float(truth.flatten()[at]):.9g}: {worst:.3g} units in the last place off, of "
            f"{proposal.ulps:g} allowed; {wrong} of {off.numel()} points exceed this",
            ulps=worst if math.isfinite(worst) else None,
        )
    return round(worst, 2)
