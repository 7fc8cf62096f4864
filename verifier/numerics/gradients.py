"""Compare a backward's formulas with autograd of its forward, in fp64.

The formulas and autograd use the same drawn inputs. The tensors that the forward stores for the backward stay
in fp64, so the formulas and autograd differ only by the error of fp64 arithmetic. This error is large where
small values are differences of large ones. To learn how large the error may be, the formulas and autograd run
again in fp32, on stored tensors whose last bits were changed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coda_agent.verifier.numerics.error_gate import LOST
from coda_agent.verifier.numerics.reference import MISTAKES, Tensors, cast, run
from coda_agent.verifier.numerics.values import Sizes
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import OutputSpec
from coda_agent.verifier.spec.rules import PARTS, assigned

LEAST = 2.0**-30  # a difference above this fraction of the RMS is suspect
UNTIED = 2.0**-10  # relative change of inputs that breaks ties
ANYTHING = OutputSpec(shape=(), dtype="fp32")
CHANGE = 2.0**-24  # relative change of the stored values
# fp64's error may be this fraction of fp32's; fp64 has 29 more bits, of which 9 are margin
NARROWER = 2.0**-20


class NoGradient(Exception):
    """A forward cannot be differentiated with respect to the inputs whose gradients a backward computes."""


def wrong(spec: Spec, drawn: Tensors, sizes: Sizes, beyond: bool = False) -> dict[str, float]:
    """Return the names of a backward's gradients that differ from autograd's gradients. The value of a name
    is the RMS of the difference, divided by the RMS of autograd's gradient.

    The result is empty for a spec without a forward. Raises NoGradient. ``beyond``: whether the inputs are
    beyond the typical ones. For such inputs, a gradient is left out if it depends too much on the last bits
    of the stored tensors (compare ``error_gate.undefined``). At a tie, such as max(z, 0) at z = 0, any
    gradient between those of both sides is right. So a gradient is also left out if it is right once ties are
    broken.
    """
    if spec.before is None:
        return {}
    off = _wrong(spec, drawn, sizes, beyond)
    untied = _wrong(spec, _untied(drawn), sizes, beyond) if off else {}
    return {name: share for name, share in off.items() if name in untied}


def _untied(drawn: Tensors) -> dict[str, Tensor]:
    """The drawn inputs with small random changes, after which no two values are equal."""
    own = torch.Generator().manual_seed(0)

    def changed(tensor: Tensor) -> Tensor:
        wide = tensor.double()
        one, other = (torch.rand(tensor.shape, generator=own, dtype=torch.float64) - 0.5 for _ in range(2))
        return wide * (1 + UNTIED * one) + UNTIED**2 * wide.square().mean().sqrt() * other

    return {n: changed(t) if t.is_floating_point() else t for n, t in drawn.items()}


def _wrong(spec: Spec, drawn: Tensors, sizes: Sizes, beyond: bool) -> dict[str, float]:
    """Like ``wrong``, but ties count too. The spec has a forward."""
    assert spec.before is not None
    leaves = _wide(drawn)
    truth, made = _autograd(spec, spec.before, leaves, sizes)
    found = _backward(spec, leaves | made, sizes, truth)
    off = {name: share for name, share in _off(found, truth).items() if not share <= LEAST}
    if not off:
        return {}
    own = torch.Generator().manual_seed(0)
    noise = {n: torch.rand(t.shape, generator=own, dtype=t.dtype) for n, t in made.items()}
    changed = {n: t * (1 + CHANGE * (2 * noise[n] - 1)) for n, t in made.items()}
    narrow = {n: cast(t, torch.float32) for n, t in (leaves | changed).items()}
    true = _autograd(spec, spec.before, narrow, sizes)[0]
    other = _backward(spec, narrow, sizes, true)
    pairs = {n: ((other[n], found[n]), (true[n], truth[n])) for n in off}
    lost = {n: max(_distance(a.double(), b, truth[n]) for a, b in each) for n, each in pairs.items()}
    off = {name: share for name, share in off.items() if not share <= NARROWER * lost[name]}
    return {name: share for name, share in off.items() if not beyond or lost[name] <= LOST}


def errors(spec: Spec, drawn: Tensors, sizes: Sizes) -> dict[str, float]:
    """For each gradient, the RMS of its difference from autograd's gradient, divided by the RMS of autograd's
    gradient. The spec must have a forward."""
    if spec.before is None:
        raise ValueError(f"spec {spec.name} has no forward")
    leaves = _wide(drawn)
    truth, made = _autograd(spec, spec.before, leaves, sizes)
    return _off(_backward(spec, leaves | made, sizes, truth), truth)


def _wide(drawn: Tensors) -> dict[str, Tensor]:
    return {name: cast(t.detach(), torch.float64) for name, t in drawn.items()}


def _off(found: Tensors, truth: Tensors) -> dict[str, float]:
    return {name: _distance(found[name], true, true) for name, true in truth.items()}


def _autograd(
    spec: Spec, before: Spec, leaves: Tensors, sizes: Sizes
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The true gradients, and the tensors that the forward stores. Raises NoGradient."""
    known = assigned(before.reference)
    into = {name[2:]: name for name in leaves if name.startswith("d_") and name[2:] in known}
    asked = {name: leaves[name].clone().requires_grad_() for name in map(_differentiated, _gradients(spec))}
    outputs = dict.fromkeys((*before.outputs, *into), ANYTHING)
    with torch.inference_mode(False), torch.enable_grad():
        values = run(before.model_copy(update={"outputs": outputs}), {**leaves, **asked}, sizes)
        for y, d in into.items():
            _check_value(y, values[y], d, leaves[d])
        total = torch.stack([(values[y] * leaves[d]).sum() for y, d in into.items()]).sum()
        if not total.requires_grad:
            raise NoGradient(f"{', '.join(into)} does not depend on {', '.join(asked)}")
        try:
            found = torch.autograd.grad(total, list(asked.values()), allow_unused=True)
        except MISTAKES as error:
            raise NoGradient(str(error).splitlines()[0]) from None
    by_input = dict(zip(asked, found, strict=True))
    truth = {d: _or_zeros(by_input[_differentiated(d)], leaves[_differentiated(d)]) for d in _gradients(spec)}
    return truth, {name: values[name].detach() for name in before.outputs}


def _check_value(name: str, value: object, gradient: str, given: Tensor) -> None:
    """Check that a value of the forward has the dtype and shape of its given gradient."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise NoGradient(f"{name} is {kind}; only a floating-point tensor has a gradient {gradient}")
    if value.shape != given.shape:
        shapes = f"{list(value.shape)}, and its gradient {gradient} has shape {list(given.shape)}"
        raise NoGradient(f"{name} has shape {shapes}")


def _backward(spec: Spec, known: Tensors, sizes: Sizes, truth: Tensors) -> dict[str, Tensor]:
    """Compute the gradients by the spec's formulas. The formulas of ``spec.head``, the part of a backward
    before its matmuls, come first (if there is such a part). A buffer to which the formulas add a gradient
    holds the true gradient before, because a large buffer would round away a small gradient."""
    updated = {n: output.updates for n, output in spec.outputs.items() if output.updates}
    known = {**known, **{buffer: truth[n] for n, buffer in updated.items() if n in truth}}
    found: dict[str, Tensor] = {}
    for part in (spec.head, spec):
        if part:
            names = {*part.outputs, *_gradients(spec, part)}
            text = part.model_copy(update={"outputs": dict.fromkeys(names, ANYTHING)})
            found |= run(text, {**known, **found}, sizes)
    for name, buffer in updated.items():
        found[name] = found[name] - known[buffer]
    return {name: _whole(name, t, known) for name, t in found.items()}


def _whole(name: str, found: Tensor, known: Tensors) -> Tensor:
    """Return the whole gradient. If ``found`` holds only partial results, sum these: all of them if the input
    is a scalar, otherwise the results of all heads."""
    if not name.endswith(PARTS):
        return found
    own = known[_differentiated(name)]
    if own.dim() and found.shape[-1] % own.shape[-1]:
        parts = f"{found.shape[-1]} columns of partial sums"
        raise NoGradient(f"{name} has {parts}, no multiple of the {own.shape[-1]} of {_differentiated(name)}")
    return found.unflatten(-1, (-1, own.shape[-1])).sum(-2) if own.dim() else found.sum()


def _gradients(spec: Spec, *parts: Spec) -> list[str]:
    """The names of all gradients that a backward's formulas assign, whether they are outputs or not."""
    parts = parts or (*([spec.head] if spec.head else []), spec)
    names = sorted({name for part in parts for name in assigned(part.reference)})
    return [name for name in names if name.startswith("d_") and _differentiated(name) in spec.drawn]


def _differentiated(gradient: str) -> str:
    return gradient[2:].removesuffix(PARTS)


def _or_zeros(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else gradient


def _distance(found: Tensor, other: Tensor, true: Tensor) -> float:
    """The RMS of the difference of two tensors, divided by the RMS of ``true``."""
    if found.shape != true.shape:
        return math.inf
    return float((found - other).norm() / true.norm().clamp_min(2.0**-900))
