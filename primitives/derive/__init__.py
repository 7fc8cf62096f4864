"""Derive backward programs from forward programs.

``derive`` runs reverse mode over a program with the derivatives of its primitives. The results are ordinary
programs: ``head``, the pointwise part without a product, for ``torch.compile``; and ``program``, the products
with their epilogues. Of the possible arrangements it takes the one with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coda_agent.primitives.compiler.roofline import ITEM_BYTES
from coda_agent.primitives.derive import ledger
from coda_agent.primitives.derive.arrange import NEXT, Attempt, Derived
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import DTYPES, OPERANDS, Program

__all__ = ["NEXT", "Derived", "all_sizes", "derive"]


def derive(
    program: Program,
    sizes: Mapping[str, int],
    wrt: Collection[str] | None = None,
    of: Collection[str] | None = None,
    behind: str | None = None,
    save_bytes: int | None = None,
    positive: Collection[str] = (),
) -> Derived:
    """Derive the backward of a checked program.

    ``wrt``: inputs whose gradients are wanted; by default all floating-point ones. ``of``: outputs whose
    gradients are inputs; by default all. ``behind``: an output whose gradient comes from the next product, of
    inputs ``d_next`` and ``w_next``. ``save_bytes``: the most bytes per row that the forward stores for the
    backward, besides its inputs. ``sizes``: the sizes at which bytes are compared. ``positive``: inputs that
    are never zero. Raises ProgramError for a program without a derivable backward.
    """
    wanted = _wanted(program, wrt)
    given = _given(program, of, behind)
    found: list[tuple[tuple[int, ...], Derived]] = []
    refusals: list[ProgramError] = []
    for save in (False, True):
        for moves in (False, True):
            attempt = Attempt(program, wanted, given, behind, save, moves, positive)
            try:
                derived = attempt.derive()
            except ProgramError as error:
                refusals.append(error)
                continue
            if save_bytes is None or _saved(program, derived, sizes) <= save_bytes:
                found.append((_cost(derived, sizes), derived))
    if not found and refusals and len(refusals) == 4:
        raise refusals[0]
    if not found:
        raise ProgramError(
            "save_bytes", f"no backward stores at most {save_bytes} bytes a row: allow more, or leave it out"
        )
    return min(found, key=lambda each: each[0])[1]


def _wanted(program: Program, wrt: Collection[str] | None) -> tuple[str, ...]:
    signature = program.signature
    if signature.updates:
        output, name = next(iter(signature.updates.items()))
        raise ProgramError(
            "updates", f"output {output!r} overwrites input {name!r}, whose value the backward may need"
        )
    eight = next((n for n, t in signature.inputs.items() if t.dtype in OPERANDS), None)
    if eight:
        raise ProgramError("dtype", f"input {eight!r} is fp8: derive the bf16 operator instead")
    floats = tuple(n for n, t in signature.inputs.items() if t.dtype in DTYPES)
    for name in wrt or ():
        if name not in signature.inputs:
            raise ProgramError("wrt", f"there is no input {name!r}; it has {', '.join(signature.inputs)}")
        if name not in floats:
            raise ProgramError("wrt", f"input {name!r} holds integers, which have no gradient")
    return floats if wrt is None else tuple(wrt)


def _given(program: Program, of: Collection[str] | None, behind: str | None) -> tuple[str, ...]:
    outputs = program.signature.outputs
    for name in (*(of or ()), *([behind] if behind else [])):
        if name not in outputs:
            raise ProgramError("of", f"there is no output {name!r}; it has {', '.join(outputs)}")
    if behind and len(outputs[behind].shape) != 2:
        raise ProgramError("behind", f"output {behind!r} is a vector, and no product reads one")
    types = program.types()
    heads = {n: t for n in outputs if (t := types[program.outputs[n]]).kind in ("head", "range")}
    for name in (*(of or ()), *([behind] if behind else [])):
        if name in heads:
            raise ProgramError("of", f"output {name!r} is {heads[name]}: its gradient is no input yet")
    chosen = tuple(n for n in outputs if n not in heads) if of is None else tuple(of)
    return chosen if behind is None or behind in chosen else (*chosen, behind)


def all_sizes(derived: Derived, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the forward's dims, and of the dims that only the backward has."""
    return {**sizes, **{name: size(sizes) for name, size in derived.widths.items()}}


def _cost(derived: Derived, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Number of programs, total bytes, number of nodes: compared in this order, fewer are better."""
    known = all_sizes(derived, {NEXT: max(sizes.values()), **sizes})
    parts = [p for p in (derived.program, derived.head) if p]
    moved = ledger.count(derived.program, known).moved if derived.program else 0
    moved += ledger.least(derived.head, known) if derived.head else 0
    return len(derived.saves), derived.head is not None, moved, sum(len(p.nodes) for p in parts)


def _saved(program: Program, derived: Derived, sizes: Mapping[str, int]) -> int:
    """Bytes per row of the first output that the forward stores for the backward, besides its inputs."""
    signature, parts = program.signature, [p for p in (derived.program, derived.head) if p]
    names = {n: t for p in parts for n, t in p.signature.inputs.items()}
    kept = {n: t for n, t in names.items() if n in signature.outputs or n in derived.saves}
    rows = next(iter(signature.outputs.values())).shape[0](sizes)
    return sum(ledger.size(t.shape, sizes) * ITEM_BYTES[t.dtype] for t in kept.values()) // rows
