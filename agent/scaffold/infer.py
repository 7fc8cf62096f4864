"""Infer the shapes and dtypes of outputs: run a draft's reference at sizes that distinguish all dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from coda_agent.agent.scaffold.draft import SpecDraft
from coda_agent.agent.scaffold.function import Note, ScaffoldError
from coda_agent.agent.scaffold.halves import Swap, swapped
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import DTYPES, INDICES, WRITABLE

if TYPE_CHECKING:
    from torch import Tensor

    from coda_agent.verifier.spec.model import Spec


class Found(NamedTuple):
    """A computed output. ``extents``: its sizes at the two ``trial_sizes``. ``shape``: each size as a formula
    over the dims; None if no formula fits."""

    extents: tuple[list[int], list[int]]
    shape: tuple[Dim | None, ...]
    dtype: str


def infer(draft: SpecDraft) -> dict[str, Found]:
    """The outputs by name. Raises ScaffoldError with the user's line if the reference does not run."""
    from coda_agent.verifier.numerics.trial import check_reference
    from coda_agent.verifier.spec.model import BadReference

    spec = draft.spec()
    try:
        # The outputs' shapes are not known yet. For an output that needs an even dim, ``cut`` has the remedy.
        check_reference(spec.model_copy(update={"outputs": {}}), odd=False)
    except BadReference as error:
        raise draft.fail(error.message + _indices(draft, error.message), error.key, error.line) from None
    first, second = (_run(draft, spec, sizes) for sizes in trial_sizes(draft))
    return {name: _inferred(draft, name, first[name], second[name]) for name in draft.outputs}


def proven(draft: SpecDraft) -> tuple[Note, ...]:
    """The draft's notes after a test. If the reference fails with a note's swaps, or its outputs change
    shape, the note gets its alternative text."""
    return tuple(
        note if not note.swaps or _runs(draft, note.swaps) else replace(note, text=note.otherwise)
        for note in draft.function.notes
    )


def _runs(draft: SpecDraft, swaps: Sequence[Swap]) -> bool:
    import torch

    from coda_agent.verifier.numerics.inputs import draw
    from coda_agent.verifier.numerics.reference import cast

    spec, sizes = draft.spec(), trial_sizes(draft)[0]
    inputs = {name: cast(tensor, torch.float64) for name, tensor in draw(spec, sizes, seed=0).items()}
    try:
        outputs = _outputs_of(draft, spec, inputs, sizes, swapped(spec.reference, swaps))
    except (ScaffoldError, NotImplementedError):
        return False
    shapes = {name: [dim(sizes) for dim in entry.shape] for name, entry in draft.outputs.items()}
    return all(list(outputs[name].shape) == shape for name, shape in shapes.items())


def _indices(draft: SpecDraft, message: str) -> str:
    """A remedy if PyTorch needs integers; "" otherwise. Vectors count as floats unless the user gives their
    dtype."""
    vectors = [name for name, e in draft.inputs.items() if len(e.shape) == 1 and e.dtype not in INDICES]
    if "Long" not in message and "int64" not in message or not vectors:
        return ""
    return f"; of indices say so: {' or '.join(f'--dtype {name}=int64' for name in vectors)}"


def _run(draft: SpecDraft, spec: Spec, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The outputs in the dtypes that follow from the inputs' dtypes; in fp64 if this machine cannot compute
    in those."""
    import torch

    from coda_agent.verifier.numerics.inputs import draw
    from coda_agent.verifier.numerics.reference import cast

    own = draw(spec, sizes, seed=0)
    wide = {name: cast(tensor, torch.float64) for name, tensor in own.items()}
    outputs = _outputs_of(draft, spec, wide, sizes, spec.reference)
    try:
        return _outputs_of(draft, spec, own, sizes, spec.baseline or spec.reference)
    except NotImplementedError:
        return outputs


def _outputs_of(
    draft: SpecDraft, spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int], text: str
) -> dict[str, Tensor]:
    import torch

    from coda_agent.verifier.numerics.reference import MISTAKES, run

    before = {name: tensor.clone() for name, tensor in inputs.items()}
    try:
        outputs = run(spec, inputs, sizes, text)
    except NotImplementedError:
        raise
    except MISTAKES as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise draft.fail(f"{reason} (tried with {dict(sizes)})") from None
    for name, tensor in inputs.items():
        if not torch.equal(tensor, before[name]):
            raise draft.fail(f"its input {name} is changed in place; assign a new value instead")
    for name, value in outputs.items():
        if not isinstance(value, torch.Tensor):
            raise draft.fail(f"output {name} is {type(value).__name__}; return each tensor by name")
    return outputs


def _inferred(draft: SpecDraft, name: str, first: Tensor, second: Tensor) -> Found:
    from coda_agent.verifier.numerics.values import DTYPES as TORCH

    both = list(first.shape), list(second.shape)
    shape = tuple(_formula(draft, list(extents)) for extents in zip(*both, strict=True))
    usual = next(e.dtype for e in draft.inputs.values())
    known = {TORCH[n]: n for n in WRITABLE.get(len(shape), DTYPES)}
    return Found(both, shape, known.get(first.dtype, usual if usual in DTYPES else "fp32"))


def _formula(draft: SpecDraft, extents: list[int]) -> Dim | None:
    """The simplest formula over the dims that gives these extents at the trial sizes; None if there is
    none."""
    every = trial_sizes(draft)
    dims = [Dim.parse(dim) for dim in draft.dims]
    known = list(dict.fromkeys([*dims, *(extent for e in draft.inputs.values() for extent in e.shape)]))
    whole = [Dim.parse(n) for n in (2, 3, 4, 8)]
    found = known + [made for n in whole for f in known if (made := _divided(f, n))]
    found += [n * f for n in whole for f in known] + [f * g for f in known for g in known]
    found += [f + g for f in known for g in known] + [n * f * g for n in whole for f in dims for g in dims]
    found += [Dim.parse(extents[0])]
    found += [f + Dim.parse(extents[0] - f(every[0])) for f in known]  # for example K - 1
    return next((f for f in found if [f(sizes) for sizes in every] == extents), None)


def cut(draft: SpecDraft, found: Found) -> tuple[str, int] | None:
    """Find the dim that an output's extent is a fraction of, as with ``chunk(3)``; return it with the number
    of parts, or None. The extent may be rounded up or down, because the trial sizes need not be divisible by
    3 or 4."""
    unknown = [place for place, extent in enumerate(found.shape) if extent is None]
    for number in (2, 3, 4):
        for dim in draft.dims:
            sizes = [trial[dim] for trial in trial_sizes(draft)]
            for place in unknown:
                made = [extents[place] for extents in found.extents]
                rounded = [n // number for n in sizes], [-(-n // number) for n in sizes]
                if made in rounded:
                    return dim, number
    return None


def _divided(formula: Dim, number: Dim) -> Dim | None:
    try:
        return formula.divided(number)
    except ValueError:
        return None


def trial_sizes(draft: SpecDraft) -> list[dict[str, int]]:
    """Two sets of sizes for the dims. All sizes are small, even and different from each other."""
    count = len(draft.dims)
    primes = [p for p in range(5, 500) if all(p % q for q in range(2, p))][: 2 * count]
    halves = primes[:count], primes[: -1 - count : -1]
    return [{dim: 2 * p for dim, p in zip(draft.dims, half, strict=True)} for half in halves]
