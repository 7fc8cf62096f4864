"""Try a spec when it is loaded: run its reference and baseline at tiny sizes, and report a mistake with its
line."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from difflib import get_close_matches
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from coda_agent.primitives.runtime.launchable import ALIGNMENT
from coda_agent.verifier.numerics import gradients
from coda_agent.verifier.numerics.inputs import draw_free
from coda_agent.verifier.numerics.reference import (
    MISTAKES,
    TEXT,
    Tensors,
    cast,
    finished,
    oracle,
    run,
    scope,
    unrounded,
)
from coda_agent.verifier.numerics.sizes import HEAD
from coda_agent.verifier.numerics.values import DTYPES, Sizes, trial
from coda_agent.verifier.spec.model import BadReference, Spec
from coda_agent.verifier.spec.parts import OutputSpec, TensorSpec

# A baseline may differ from the reference by this share of an output's RMS. Rounding gives up to 0.03 (in an
# fp8 output).
UNLIKE = 0.25
# In fp32, a reference may be off by this share of an output's RMS. Those of the shipped specs are off by up
# to 2e-6.
UNSTABLE = 1e-3
TINY = 1e-3  # an RMS below this counts as this


def check_reference(spec: Spec, *, strict: bool = True) -> None:
    """Run reference and baseline at tiny sizes; raise BadReference for the first wrong name, shape or output.

    The reference runs in fp64. The text that the benchmark times (the baseline if there is one, else the
    reference) also runs with the inputs in their own dtypes. This second run is ignored if the machine lacks
    an operation in those dtypes (for example ``torch.mm`` with an ``out_dtype`` on a CPU). ``strict``: also
    refuse a reference that works only at even sizes, and an index without a domain.
    """
    _check_rows(spec)
    grouped = any(t.init.offsets is not None for t in spec.drawn.values())
    # torch's grouped_mm accepts only rows that are a multiple of 16 bytes
    times = dict.fromkeys(spec.dims, ALIGNMENT) if grouped else None
    sizes, drawn = trial(spec, times)
    try:
        inputs = _run(spec, drawn, sizes)
    except BadReference as error:
        raise _with_multiple(spec, error) from None
    if strict and (failed := _failure(spec, dict.fromkeys(spec.dims, 1))):
        raise _with_multiple(spec, failed)
    if strict:
        _check_indices(spec, drawn, sizes)
    _check_informative(spec, sizes)
    try:
        off = gradients.wrong(spec, drawn, sizes)
    except gradients.NoGradient as error:
        raise BadReference(f"forward: {error}", key="forward") from None
    for name, share in off.items():
        raise BadReference(f"{name} is not the gradient of forward: off by {share:.2g} of its RMS")
    try:
        _check_timed(spec, inputs, sizes)
    except _Untriable:
        return
    except _OtherBaseline:
        # on these inputs an activation may saturate, so that rounding loses a gradient
        _check_timed(spec, _run(spec, trial(spec, times, typical=True)[1], sizes), sizes)
    except BadReference as error:
        if spec.baseline is not None:
            raise
        message = f"{error.message}; it is timed on inputs in their own dtypes: give a baseline with casts"
        raise BadReference(message, error.line) from None


class _OtherBaseline(BadReference):
    """On some inputs, the baseline computes something else than the reference."""


def _check_timed(spec: Spec, inputs: Tensors, sizes: Sizes) -> None:
    """Run the text that the benchmark times, with the inputs in their own dtypes. Compare a baseline with the
    reference in fp64."""
    own = {name: cast(inputs[name], DTYPES[t.dtype]) for name, t in spec.inputs.items()}
    if spec.baseline is None:
        _try(spec, "reference", own, sizes)
        return
    # computed first, because a baseline may write to an updated input
    expected = run(spec, {name: cast(tensor, torch.float64) for name, tensor in own.items()}, sizes)
    _check_baseline(spec, _try(spec, "baseline", own, sizes), expected)


def _check_baseline(spec: Spec, found: Tensors, expected: Tensors) -> None:
    """Raise _OtherBaseline if the baseline computes something else than the reference, because the benchmark
    would then compare different work."""
    for name in spec.outputs:
        finite = expected[name].isfinite()
        truth, error = expected[name][finite], (found[name].double() - expected[name])[finite]
        share = float(error.square().mean().sqrt() / truth.square().mean().sqrt().clamp(min=TINY))
        if finite.any() and not share <= UNLIKE:
            raise _OtherBaseline(
                f"baseline: output {name!r} differs from the reference's by {share:.2g} of its RMS; let both "
                "compute the same",
                key="baseline",
            )


def _check_rows(spec: Spec) -> None:
    """Raise BadReference if TMA cannot read an input's rows or write an output's rows in some case, because
    then no kernel could be accepted. Statistics of heads are written one by one, so an output may have any
    number of heads as columns."""
    tensors: dict[str, TensorSpec | OutputSpec] = {**spec.inputs, **spec.outputs}
    terms = [term for tensor in tensors.values() for extent in tensor.shape for term in extent.terms]
    heads = {n for names, number in terms if len(names) > 1 or number >= HEAD for n in names}
    for case in spec.cases:
        for name, tensor in tensors.items():
            if len(tensor.shape) < 2 or (name in spec.outputs and str(tensor.shape[-1]) in heads):
                continue
            columns = tensor.shape[-1](case.sizes)
            if columns * DTYPES[tensor.dtype].itemsize % ALIGNMENT:
                rows = f"rows of {columns} {tensor.dtype}, no multiple of {ALIGNMENT} bytes"
                raise BadReference(f"case {case.name!r} gives {name} {rows}: choose other sizes", key="cases")


def _run(spec: Spec, drawn: Tensors, sizes: Sizes) -> dict[str, Tensor]:
    """Run the reference on the drawn inputs. The reference of a backward also needs computed inputs. So first
    run the forward; then run ``head``, which is the backward's part before its matmuls. Return all inputs of
    the reference."""
    inputs = dict(drawn)
    for part in (spec.before, spec.head):
        inputs |= _try(part, "forward", inputs, sizes) if part else {}
    _try(spec, "reference", inputs, sizes)
    return inputs


def _check_indices(spec: Spec, drawn: Tensors, sizes: Sizes) -> None:
    """Run the reference on the least and on the largest legal value of each integer input without a domain,
    and raise BadReference if it fails: it then uses the input as an index."""
    for name, tensor in spec.drawn.items():
        if tensor.init.integers is None or not isinstance(tensor.domain, str):
            continue
        first, end = tensor.init.integers
        last = end - 1 if isinstance(end, int) else f"{end} - 1"
        limits = torch.iinfo(DTYPES[tensor.dtype])
        for bound in tensor.bounds(sizes):
            value = max(limits.min, min(limits.max, int(bound)))
            try:
                _run(spec, {**drawn, name: torch.full_like(drawn[name], value)}, sizes)
            except BadReference as error:
                words = f"{error.message.partition(' (tried with')[0]}, where {name} is {value}"
                remedy = f"say which values {name} may have, as in domain: [{first}, {last}]"
                raise BadReference(f"{words}; {remedy}", error.line, error.key) from None


def _check_informative(spec: Spec, sizes: Sizes) -> None:
    """Raise BadReference for an output that says nothing about a program: it has no finite value, no input
    changes it, or the reference itself is not accurate in fp32."""
    drawn = [finished(spec, draw_free(spec, sizes, seed), sizes) for seed in (1, 2)]
    first, second = (oracle(spec, inputs, sizes) for inputs in drawn)
    narrow = unrounded(spec, drawn[0], sizes)
    for name, value in first.items():
        if not value.isfinite().any():
            raise BadReference(f"output {name!r} has no finite value, so it says nothing about a kernel")
        if torch.equal(value.nan_to_num(), second[name].nan_to_num()):
            raise BadReference(f"output {name!r} depends on no input, so it says nothing about a kernel")
        finite = value.isfinite()
        off = float((narrow[name] - value)[finite].norm() / value[finite].norm().clamp_min(2.0**-900))
        if not off <= UNSTABLE:
            size = f"off by {off:.2g} of its RMS" if math.isfinite(off) else "not finite"
            why = f"in fp32, output {name!r} is {size} on typical inputs"
            raise BadReference(f"{why}: write it so that it neither cancels nor overflows")


def _with_multiple(spec: Spec, failed: BadReference) -> BadReference:
    """Return the failure. If the reference runs only when some dims are multiples of a number, name the dims
    and the number in the message. No program could implement such a spec, because a kernel must be valid at
    every size."""
    number, needed = _multiple(spec)
    if not number:
        return failed
    free = next(name for name in "PQRSTUVWXYZ" if name not in spec.dims)
    need = f"it needs {needed} to be a multiple of {number}, and a kernel's types hold at every size"
    remedy = f"say so in the shapes, with {number}*{free} for {needed}"
    return BadReference(f"{failed.message}: {need}; {remedy}", failed.line, failed.key)


def _multiple(spec: Spec) -> tuple[int, str]:
    """Find the least number such that the reference runs once certain dims are multiples of it. Return the
    number and the names of these dims, or 0 and "" if no number is found. Try only powers of two, and
    numbers in the reference's text."""
    literals = {n.value for n in ast.walk(ast.parse(spec.reference)) if isinstance(n, ast.Constant)}
    numbers = sorted({2**n for n in range(1, 9)} | {n for n in literals if type(n) is int and 1 < n <= 1024})
    for number in numbers:
        others = dict.fromkeys(spec.dims, 1)
        if any_of := [dim for dim in spec.dims if _failure(spec, {**others, dim: number}) is None]:
            return number, " or ".join(any_of)
    for number in (n for n in numbers if n <= ALIGNMENT):
        every = dict.fromkeys(spec.dims, number)
        if _failure(spec, every) is None:
            all_of = [dim for dim in spec.dims if _failure(spec, {**every, dim: 1})]
            return number, " and ".join(all_of)
    return 0, ""


def _failure(spec: Spec, times: Mapping[str, int]) -> BadReference | None:
    """The reference's failure at tiny sizes that are multiples of ``times``; None if it runs."""
    try:
        sizes, drawn = trial(spec, times)
        _run(spec, drawn, sizes)
    except BadReference as error:
        return error
    return None


class _Untriable(BadReference):
    """The text cannot be tried, because PyTorch lacks one of its operations on this device."""


def _is_missing_operation(error: BaseException) -> bool:
    """Whether the error says that PyTorch lacks an operation. On some processors, PyTorch's scaled fp8
    matmuls say so by a failed assertion."""
    return isinstance(error, NotImplementedError) or "INTERNAL ASSERT FAILED" in str(error)


def _try(
    spec: Spec, key: Literal["forward", "reference", "baseline"], inputs: Tensors, sizes: Sizes
) -> dict[str, Tensor]:
    text = (key == "baseline" and spec.baseline) or spec.reference
    try:
        _check_defined(spec, text)
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        outputs = _attempt(spec, inputs, sizes, text)
        _check_unchanged(spec, key, before, inputs)
        for name in spec.outputs:
            _check_output(spec, name, outputs[name], sizes)
        return outputs
    except BadReference as error:
        raise type(error)(f"{key}: {error.message}", error.line, key) from None


def _check_defined(spec: Spec, text: str) -> None:
    names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own = {*spec.inputs, *spec.dims, *spec.constants, *stored}
    for node in names:
        if node.id not in own and node.id not in scope():
            close = get_close_matches(node.id, sorted(own), n=1) or get_close_matches(node.id, scope(), n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "declare it, or use torch's names"
            raise BadReference(f"name {node.id!r} is not defined; {remedy}", node.lineno)


def _attempt(spec: Spec, inputs: Tensors, sizes: Sizes, text: str) -> dict[str, Tensor]:
    before = torch.get_rng_state()
    try:
        outputs = run(spec, inputs, sizes, text)
    except MISTAKES as error:
        line = _text_line(error.__traceback__)
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        kind = _Untriable if _is_missing_operation(error) else BadReference
        raise kind(f"{reason} (tried with {shapes}, where {_assignments(sizes)})", line) from None
    if not torch.equal(before, torch.get_rng_state()):
        raise BadReference(
            "it draws random numbers, so each call would give another result: make them an input"
        )
    return outputs


def _check_unchanged(spec: Spec, key: str, before: Tensors, inputs: Tensors) -> None:
    """Raise BadReference if a text has written to an input. The truth, the yardstick and the kernel read the
    same tensors, so each would see other values. Only a baseline may write, and only to an updated input."""
    updated = {output.updates for output in spec.outputs.values()} if key == "baseline" else set()
    for name in inputs.keys() - updated:
        if not torch.equal(cast(before[name], torch.float64), cast(inputs[name], torch.float64)):
            raise BadReference(
                f"it writes to its input {name!r}, which others read after it: make a new tensor, such as "
                f"{name} = {name} + 1 in place of {name} += 1"
            )


def _check_output(spec: Spec, name: str, value: object, sizes: Sizes) -> None:
    declared = spec.outputs[name]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise BadReference(f"output {name!r} is {kind}; it must be a floating-point tensor")
    expected = [d(sizes) for d in declared.shape]
    if list(value.shape) != expected:
        symbols = ", ".join(map(str, declared.shape))
        message = f"output {name!r} has shape {list(value.shape)}, declared [{symbols}] = {expected}"
        raise BadReference(f"{message} with {_assignments(sizes)}")


def _assignments(sizes: Sizes) -> str:
    return ", ".join(f"{dim}={size}" for dim, size in sizes.items())


def _text_line(traceback: TracebackType | None) -> int | None:
    line = None
    while traceback:
        if traceback.tb_frame.f_code.co_filename == TEXT:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
