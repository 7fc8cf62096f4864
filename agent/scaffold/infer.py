"""Infer the shapes and dtypes of outputs by running a draft's reference with a different size for every
dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from coda_agent.agent.scaffold.draft import SpecDraft
from coda_agent.agent.scaffold.function import Note, ScaffoldError
from coda_agent.agent.scaffold.halves import Swap, swapped
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.signature import DTYPES, INDICES, WRITABLE

if TYPE_CHECKING:
    from torch import Tensor

    from coda_agent.verifier.spec.model import Spec


class Found(NamedTuple):
    """A computed output. ``extents``: its shape at each of the two ``trial_sizes``. ``shape``: each extent as
    a formula over the dims, or None if no formula fits."""

    extents: tuple[list[int], list[int]]
    shape: tuple[Dim | None, ...]
    dtype: str


def infer(draft: SpecDraft) -> dict[str, Found]:
    """Return the outputs by name. Raises ScaffoldError, which names a line of the user's file, if the
    reference does not run."""
    from coda_agent.verifier.apart import check_reference
    from coda_agent.verifier.spec.model import BadReference

    if draft.function.baseline is not None:
        _choose_reference(draft)
    spec = draft.spec()
    try:
        # The outputs' shapes are not known yet. Do not try odd sizes. If a dim must be even, ``cut`` finds
        # the remedy later.
        check_reference(spec.model_copy(update={"outputs": {}}), strict=False)
    except BadReference as error:
        raise draft.fail(error.message + _indices(draft, error.message), error.key, error.line) from None
    first, second = (_run(draft, spec, sizes) for sizes in trial_sizes(draft))
    return {name: _inferred(draft, first[name], second[name]) for name in draft.outputs}


def _choose_reference(draft: SpecDraft) -> None:
    """If the function computes something else without its casts, let the reference cast to fp64. For example,
    a sum of two comparisons is a number only if they are cast."""
    kept = replace(draft, function=replace(draft.function, reference=draft.function.exact))
    expected, found = _exact(kept), _exact(draft)
    if expected and not (found and all(_equal(found[name], expected[name]) for name in expected)):
        draft.function = kept.function


def _exact(draft: SpecDraft, swaps: Sequence[Swap] = ()) -> dict[str, Tensor] | None:
    """Return the outputs of the draft's reference in fp64, with ``swaps``; None if it does not run."""
    import torch

    from coda_agent.verifier.numerics.inputs import draw
    from coda_agent.verifier.numerics.reference import cast

    spec, sizes = draft.spec(), trial_sizes(draft)[0]
    inputs = {name: cast(tensor, torch.float64) for name, tensor in draw(spec, sizes, seed=0).items()}
    try:
        return _outputs_of(draft, spec, inputs, sizes, swapped(spec.reference, swaps))
    except (ScaffoldError, NotImplementedError):
        return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.double().allclose(other.double(), equal_nan=True)


def proven(draft: SpecDraft) -> tuple[Note, ...]:
    """Return the draft's notes, after a test of each note's swaps. If the reference fails with the swaps, or
    an output changes shape, the note's ``otherwise`` replaces the note's ``text``."""
    return tuple(
        note if not note.swaps or _runs(draft, note.swaps) else replace(note, text=note.otherwise)
        for note in draft.function.notes
    )


def _runs(draft: SpecDraft, swaps: Sequence[Swap]) -> bool:
    sizes, outputs = trial_sizes(draft)[0], _exact(draft, swaps)
    shapes = {name: [dim(sizes) for dim in entry.shape] for name, entry in draft.outputs.items()}
    return outputs is not None and all(list(outputs[n].shape) == shape for n, shape in shapes.items())


def _indices(draft: SpecDraft, message: str) -> str:
    """Return a remedy if PyTorch's message asks for integers, else "". Vectors are floats by default, so the
    user must give an integer dtype."""
    vectors = [name for name, e in draft.inputs.items() if len(e.shape) == 1 and e.dtype not in INDICES]
    if "Long" not in message and "int64" not in message or not vectors:
        return ""
    return f"; for a vector of indices, give {' or '.join(f'--dtype {name}=int64' for name in vectors)}"


def _run(draft: SpecDraft, spec: Spec, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the outputs, computed in the inputs' dtypes. If this machine cannot compute in these dtypes,
    return the outputs computed in fp64."""
    import torch

    from coda_agent.verifier.numerics.inputs import draw
    from coda_agent.verifier.numerics.reference import cast

    inputs = draw(spec, sizes, seed=0)
    wide = {name: cast(tensor, torch.float64) for name, tensor in inputs.items()}
    outputs = _outputs_of(draft, spec, wide, sizes, spec.reference)
    try:
        return _outputs_of(draft, spec, inputs, sizes, spec.baseline or spec.reference)
    except NotImplementedError:
        return outputs


def _outputs_of(
    draft: SpecDraft, spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int], text: str
) -> dict[str, Tensor]:
    import torch

    from coda_agent.verifier.numerics.reference import MISTAKES, run

    try:
        outputs = run(spec, inputs, sizes, text)
    except NotImplementedError:
        raise
    except MISTAKES as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise draft.fail(f"{reason} (tried with {dict(sizes)})") from None
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise draft.fail(f"output {name} is {type(value).__name__}; return each tensor by name")
    return outputs


def _inferred(draft: SpecDraft, first: Tensor, second: Tensor) -> Found:
    from coda_agent.verifier.numerics.values import DTYPES as TORCH

    both = list(first.shape), list(second.shape)
    shape = tuple(_formula(draft, list(extents)) for extents in zip(*both, strict=True))
    usual = next(e.dtype for e in draft.inputs.values())
    names = {TORCH[n]: n for n in WRITABLE.get(len(shape), DTYPES)}
    return Found(both, shape, names.get(first.dtype, usual if usual in DTYPES else "fp32"))


def _formula(draft: SpecDraft, extents: list[int]) -> Dim | None:
    """Return the simplest formula over the dims that gives ``extents`` at the trial sizes; None if no formula
    does."""
    every = trial_sizes(draft)
    dims = [Dim.parse(dim) for dim in draft.dims]
    plain = list(dict.fromkeys([*dims, *(extent for e in draft.inputs.values() for extent in e.shape)]))
    factors = [Dim.parse(n) for n in (2, 3, 4, 8)]
    formulas = plain + [part for n in factors for f in plain if (part := _divided(f, n))]
    formulas += [n * f for n in factors for f in plain] + [f * g for f in plain for g in plain]
    formulas += [f + g for f in plain for g in plain] + [
        n * f * g for n in factors for f in dims for g in dims
    ]
    formulas += [Dim.parse(extents[0])]
    formulas += [f + Dim.parse(extents[0] - f(every[0])) for f in plain]  # for example K - 1
    return next((f for f in formulas if [f(sizes) for sizes in every] == extents), None)


def cut(draft: SpecDraft, output: Found) -> tuple[str, int] | None:
    """If an extent of the output is a dim divided by 2, 3 or 4, as after ``chunk(2)``, return the dim and the
    divisor. Otherwise return None. The quotient may be rounded, because a trial size need not be a multiple
    of 3 or 4."""
    unknown = [place for place, extent in enumerate(output.shape) if extent is None]
    for number in (2, 3, 4):
        for dim in draft.dims:
            sizes = [trial[dim] for trial in trial_sizes(draft)]
            for place in unknown:
                extents = [shape[place] for shape in output.extents]
                rounded = [n // number for n in sizes], [-(-n // number) for n in sizes]
                if extents in rounded:
                    return dim, number
    return None


def _divided(formula: Dim, number: Dim) -> Dim | None:
    try:
        return formula.divided(number)
    except ValueError:
        return None


def trial_sizes(draft: SpecDraft) -> list[dict[str, int]]:
    """Return two sets of sizes for the dims. All sizes are small, even and different from each other."""
    count = len(draft.dims)
    primes = [p for p in range(5, 500) if all(p % q for q in range(2, p))][: 2 * count]
    halves = primes[:count], primes[: -1 - count : -1]
    return [{dim: 2 * p for dim, p in zip(draft.dims, half, strict=True)} for half in halves]
