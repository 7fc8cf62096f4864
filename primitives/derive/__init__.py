"""Derive backward programs from forward programs.

``derive`` applies reverse-mode differentiation to a program. Each primitive defines its own derivative. A
backward has two parts, and each part is a program. ``head`` runs first: it is the pointwise part, which needs
no matmul and is compiled by ``torch.compile``. ``program`` contains the matmuls with their epilogues.
``choose`` finds the cheapest plan. A plan says which values the forward stores for the backward, and which
values the backward recomputes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coda_agent.primitives.derive.arrange import NEXT, BackwardRequest, Derived
from coda_agent.primitives.derive.choose import NEXT_SIZE, Search, all_sizes, forced
from coda_agent.primitives.derive.ranges import Joined, joined
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import DTYPES, OPERANDS

__all__ = ["NEXT", "NEXT_SIZE", "Derived", "all_sizes", "derive"]


def derive(
    program: Program,
    sizes: Mapping[str, int],
    wrt: Collection[str] | None = None,
    of: Collection[str] | None = None,
    behind: str | None = None,
    save_bytes: int | None = None,
    positive: Collection[str] = (),
    accumulate: Collection[str] = (),
    save: Collection[str] = (),
    recompute: Collection[str] = (),
) -> Derived:
    """Derive the backward of a checked program.

    ``sizes``: the sizes of the dims, for which the costs of plans are compared. ``wrt``: inputs whose
    gradients are wanted; by default all floating-point inputs. ``of``: outputs whose gradients the backward
    reads as inputs; by default all outputs. No kernel reads the gradient of a head statistic, or of a range
    of columns, so ``of`` must leave these out. ``behind``: an output whose gradient the backward computes as
    the matmul of two inputs, ``d_next`` and ``w_next``. ``save_bytes``: the most bytes per row that the
    forward may store for the backward, not counting the forward's inputs. ``positive``: inputs that are never
    zero, so that the backward may divide by them. ``accumulate``: inputs whose gradients the backward adds in
    place to fp32 buffers; the buffer for the gradient of X is ``sum_X``. ``save``: outputs, or nodes such as
    ``node 3``, that must be stored. ``recompute``: outputs or nodes that must not be stored.

    If several outputs are ranges of one tile and together contain all of its columns, they count as one
    output. For example, q, k and v become ``q_k_v``. Raises ProgramError if no backward can be derived.
    """
    wanted, whole = _inputs_to_differentiate(program, wrt), joined(program)
    for name in accumulate:
        if name not in wanted:
            raise ProgramError(
                "accumulate",
                f"the gradient of {name!r} is not requested; only those of {', '.join(wanted)} are",
            )
    of = _incoming(whole, of, behind)
    added = tuple(dict.fromkeys(accumulate))
    request = BackwardRequest(whole.program, wanted, of, behind, tuple(positive), added)
    return Search(request, sizes, save_bytes, forced(whole.program, save, recompute)).best()


def _inputs_to_differentiate(program: Program, wrt: Collection[str] | None) -> tuple[str, ...]:
    """Return the inputs whose gradients are wanted: ``wrt`` after a check, or all floating-point inputs if
    ``wrt`` is None."""
    signature = program.signature
    if signature.updates:
        output, name = next(iter(signature.updates.items()))
        raise ProgramError(
            "updates",
            f"output {output!r} overwrites input {name!r}, whose value the backward may need: derive the "
            "operator without the update",
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
    wanted = floats if wrt is None else tuple(wrt)
    for name in wanted:
        if taken := {f"d_{name}", f"d_{name}_parts"} & {*signature.inputs, *signature.outputs}:
            raise ProgramError("wrt", f"{min(taken)!r} would name the gradient of {name!r} too: rename it")
    return wanted


def _incoming(whole: Joined, of: Collection[str] | None, behind: str | None) -> tuple[str, ...]:
    """Check ``of`` and ``behind``. Return the outputs from whose gradients the backward starts."""
    program, outputs = whole.program, whole.program.signature.outputs
    of = None if of is None else whole.named(of)
    for name in (*(of or ()), *([behind] if behind else [])):
        if name not in outputs:
            raise ProgramError("of", f"there is no output {name!r}; it has {', '.join(outputs)}")
    if behind and len(outputs[behind].shape) != 2:
        raise ProgramError("behind", f"output {behind!r} is a vector, and no matmul reads a vector")
    if behind and (taken := {"next", "w_next", "d_next"} & {*program.signature.inputs, *outputs}):
        raise ProgramError("behind", f"{min(taken)!r} would name a tensor of the next matmul too: rename it")
    types = program.types()
    heads = {n: t for n in outputs if (t := types[program.outputs[n]]).kind in ("head", "range")}
    others = ",".join(n for n in outputs if n not in heads)
    for name in (*(heads if of is None else of), *([behind] if behind else [])):
        if name in heads:
            why = f"output {name!r} is {heads[name]}, whose gradient no kernel reads"
            remedy = f"leave it out, with --of {others}" if others else "leave it out, with --of"
            raise ProgramError("of", f"{why}: {remedy}")
    chosen = tuple(outputs) if of is None else tuple(dict.fromkeys(of))
    return chosen if behind is None or behind in chosen else (*chosen, behind)
