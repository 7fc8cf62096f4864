"""Mutants of a spec's reference, each with one plausible mistake, that the gates must catch.

Some mutants have wrong mathematics: their reference text has a mistake that a program could have too. The
error gate judges such a mutant as the interpret gate judges a program: on stored outputs, and again on
outputs left in fp32. Other mutants have wrong execution: they have the reference's own text, but damaged
matmuls or outputs, as a faulty lowering or a cheat would produce. The error gate judges these mutants only on
stored outputs.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.signature import EIGHTS
from coda_agent.verifier.numerics.reference import Product
from coda_agent.verifier.numerics.sizes import TILE
from coda_agent.verifier.numerics.strength.reference_mutations import slips
from coda_agent.verifier.spec.model import Spec

Outputs = dict[str, Tensor]
TAIL = 16  # the number of K elements that one tensor-core instruction multiplies
E4M3_LARGEST = 448.0
# how many more mantissa bits fp32 has than each dtype
FEWER_BITS = {"bf16": 16, "fp16": 13, "fp8_e4m3": 20, "fp8_e5m2": 21}


@dataclass(frozen=True)
class ReferenceMutant:
    """A wrong version of the reference: its text, its matmuls, and the damage to its outputs.

    ``text`` is the reference's own text if only the execution is wrong. ``product`` replaces the matmuls; it
    is None if the matmuls are correct. ``after`` damages the outputs.
    """

    name: str
    text: str
    product: Product | None = None
    after: Callable[[Outputs], Outputs] = dict

    @property
    def spoken(self) -> bool:
        """Whether a program can express the mutant, because only the mutant's text differs from the
        reference."""
        return self.product is None and self.after is dict


def mutants(spec: Spec) -> Iterator[ReferenceMutant]:
    """Yield all mutants, in a fixed order, with unique names. If several mistakes lead to the same text, the
    text counts once."""
    text = ast.unparse(ast.parse(spec.reference))
    yield from _wrong_outputs(spec, text)
    yield from _wrong_matmuls(spec, text)
    known, named = {text}, Counter[str]()
    for name, wrong in slips(spec, text):
        if wrong not in known:
            known.add(wrong)
            named[name] += 1
            yield ReferenceMutant(name if named[name] == 1 else f"{name} ({named[name]})", wrong)


# --- outputs ----------------------------------------------------------------------------------------


def _wrong_outputs(spec: Spec, text: str) -> Iterator[ReferenceMutant]:
    for name, output in spec.outputs.items():
        yield ReferenceMutant(f"{name} zeroed", f"{text}\n{name} = zeros_like({name})")
        yield ReferenceMutant(f"{name} times 1.002", f"{text}\n{name} = 1.002 * {name}")
        yield ReferenceMutant(f"{name} negated", f"{text}\n{name} = -{name}")
        yield ReferenceMutant(f"{name} without its last rows", text, after=_changed(name, _without_last_rows))
        if len(output.shape) > 1:
            flipped = _changed(name, lambda t: _without_last_rows(t.mT).mT)
            yield ReferenceMutant(f"{name} without its last columns", text, after=flipped)
            yield ReferenceMutant(
                f"{name} with one wrong column", text, after=_changed(name, _one_wrong_column)
            )
            yield ReferenceMutant(f"{name} with one wrong row", text, after=_changed(name, _one_wrong_row))
        if output.dtype != "fp32":
            cut = partial(_truncated, bits=FEWER_BITS[output.dtype])
            yield ReferenceMutant(f"{name} truncated, not rounded", text, after=_changed(name, cut))
        if output.dtype in EIGHTS:
            end = torch.finfo(torch_dtype(output.dtype)).max
            yield ReferenceMutant(
                f"{name} not saturated", text, after=_changed(name, partial(_overflown, end=end))
            )
            half = partial(torch.clamp, min=-end / 2, max=end / 2)
            yield ReferenceMutant(f"{name} within half its range", text, after=_changed(name, half))
    for a, b in combinations(spec.outputs, 2):
        if (spec.outputs[a].shape, spec.outputs[a].dtype) == (spec.outputs[b].shape, spec.outputs[b].dtype):
            yield ReferenceMutant(f"{a} and {b} swapped", f"{text}\n{a}, {b} = ({b}, {a})")


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Outputs], Outputs]:
    return lambda outputs: {**outputs, name: change(outputs[name])}


def _without_last_rows(output: Tensor) -> Tensor:
    """The output with zeros in the rows of its last tile, as if these rows were never stored."""
    kept = output.clone()
    kept[(output.shape[0] - 1) // TILE * TILE :] = 0
    return kept


def _one_wrong_column(output: Tensor) -> Tensor:
    """The output with one column replaced by the column before it."""
    kept, at = output.clone(), output.shape[1] // 2
    kept[:, at] = output[:, at - 1]
    return kept


def _one_wrong_row(output: Tensor) -> Tensor:
    return _one_wrong_column(output.mT).mT


def _truncated(output: Tensor, bits: int) -> Tensor:
    """Clear the last ``bits`` bits of fp32 values, as a truncating cast does."""
    return (output.contiguous().view(torch.int32) >> bits << bits).view(torch.float32)


def _overflown(output: Tensor, end: float) -> Tensor:
    """Replace saturated values by NaN, as a cast without saturation does."""
    return output.where(output.abs() < end, torch.nan)


# --- matmuls ----------------------------------------------------------------------------------------


def _wrong_matmuls(spec: Spec, text: str) -> Iterator[ReferenceMutant]:
    yield ReferenceMutant(f"the last {TAIL} of K dropped", text, _without_tail)
    yield ReferenceMutant("one element of K dropped", text, _without_first)
    # rounding to fp8 does not change fp8 operands
    if all(t.dtype != "fp8_e4m3" for t in spec.inputs.values()):
        yield ReferenceMutant("matmul operands in fp8", text, _in_fp8)
    yield ReferenceMutant("matmuls accumulated in bf16", text, partial(_accumulated, dtype=torch.bfloat16))
    if any(t.dtype == "fp16" for t in spec.inputs.values()):
        yield ReferenceMutant("matmuls accumulated in fp16", text, partial(_accumulated, dtype=torch.float16))
    yield ReferenceMutant("matmuls rounded to bf16", text, _rounded)
    yield ReferenceMutant("matmuls added from two halves of K in bf16", text, _halved)


def _without_tail(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :-TAIL].float() @ b[..., :-TAIL, :].float()


def _without_first(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 1:].float() @ b[..., 1:, :].float()


def _in_fp8(a: Tensor, b: Tensor) -> Tensor:
    return _through_fp8(a) @ _through_fp8(b)


def _through_fp8(t: Tensor) -> Tensor:
    """Scale values by a power of two to fill e4m3's range, round them to e4m3, and scale them back. Tensors
    of fp8 values are unchanged."""
    largest = t.float().abs().max().clamp_min(2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(E4M3_LARGEST / largest)))
    return (t.float() * scale).to(torch.float8_e4m3fn).float() / scale


def _accumulated(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A matmul that rounds its sum to ``dtype`` after every ``TAIL`` terms (one instruction)."""
    total = torch.zeros((), dtype=dtype, device=a.device)
    for k in range(0, a.shape[-1], TAIL):
        part = a[..., k : k + TAIL].float() @ b[..., k : k + TAIL, :].float()
        total = (total + part).to(dtype)
    return total.float()


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    """A matmul's result rounded to bf16, as a kernel without an epilogue leaves it."""
    return (a.float() @ b.float()).bfloat16().float()


def _halved(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    return _rounded(a[..., :half], b[..., :half, :]) + _rounded(a[..., half:], b[..., half:, :])
