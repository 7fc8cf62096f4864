"""Check the operations that choose between two values (sides), such as ``where`` and ``maximum``. Removing a
side must change the result for some valid input. Also check that no result jumps at a particular size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.system import deadline
from coda_agent.verifier.gates import Failed, judge
from coda_agent.verifier.numerics.cpu_numerics import Comparison, InputSettings, unrounded
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.reference import finished
from coda_agent.verifier.numerics.sizes import hidden
from coda_agent.verifier.numerics.strength.choices import Counting, Coverage, Distorting, Forcing
from coda_agent.verifier.numerics.strength.search import LARGEST, searches
from coda_agent.verifier.numerics.stretch import SEARCHED
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Case

NEARBY = (1 + 2**-20, 1 - 2**-12, 1 + 2**-9, 1 - 2**-6, 1 + 2**-3)  # factors by which a size changes
STEEPEST = 8  # results may grow with at most this power of a size
SMALLEST = 8  # the smallest size tried; from a smaller size, a step of 1 changes even smooth results a lot
NOISE = 1e-4  # relative change of outputs that another order of fp32 sums may cause
TRIES = 3  # largest number of runs in which the program is tried without a side


def cover(compared: Comparison, program: Program, coverage: Coverage, counts: Counting) -> None:
    """Add a judged run to the coverage. If a side decided values in this run, and no earlier run has needed
    the side, try the program without the side, and record whether the program fails."""
    coverage.add(counts.counts, compared.run.family)
    for side in coverage.open:
        count, seen = counts.counts.get(side), coverage.seen[side]
        if count and count.decided and seen.tries < TRIES:
            seen.tries += 1
            if not compared.passes(program, Forcing(program, side)):
                seen.needed = compared.run.family
            elif coverage.forms(side) and not seen.judged:
                seen.judged = not compared.passes(program, Distorting(program, side))


def reach(
    spec: Spec, program: Program, coverage: Coverage, seed: int, lines: Sequence[int | None] = ()
) -> None:
    """Search the spec's domain for inputs that need the open sides (the sides that no run has needed yet).
    The program is judged on these inputs as on all other inputs.

    Raises Failed if the program is wrong on such inputs, or if the search finds no inputs that need a side.
    """
    for sizes, drawn_from, drawn in searches(spec, program, seed) if coverage.open else ():
        deadline.check()
        counts = Counting(program, coverage.open)
        interpret(program, finished(spec, drawn, sizes), counts, sizes)
        if not any(count.decided for count in counts.counts.values()):
            continue
        run = InputSettings(sizes, SEARCHED, drawn_from)
        compared = Comparison.of(spec, run, drawn)
        if len(compared.undefined) == len(spec.outputs):
            continue
        for how, errors in compared.errors(program):
            judge(errors, f"in the interpreter, {run}, outputs {how}")
        for side in coverage.open:
            coverage.seen[side].tries = 0  # so that every draw of the search is tried without the side
        cover(compared, program, coverage, counts)
        if not coverage.open:
            return
    for side in coverage.unexercised():
        line = lines[side.node] if side.node < len(lines) else None
        op = program.nodes[side.node].op
        raise Failed(
            "idle_choice",
            f"{op} changes nothing within the spec's domain: {side.unused(program)}, or the outputs are the "
            "same without it; remove it, or the code that hides its effect",
            line,
        )


def smooth(spec: Spec, program: Program, seed: int) -> None:
    """Run the program with slightly different sizes in its formulas, on the same tensors, and compare the
    outputs.

    Results must depend smoothly on sizes. For example, a mean divides a sum by the number of columns. The
    program runs on small inputs, but with a case's sizes in its formulas. Then the program runs again with
    one or all of these sizes slightly changed. A scalar that depends only on sizes is computed for every size
    up to twice the size in a case. Raises Failed if the outputs, or such a scalar, change more than the
    eighth power of a size does.
    """
    sized = {i: Dim.parse(str(n.attribute)) for i, n in enumerate(program.nodes) if n.op == "dim"}
    dims = sorted({name for size in sized.values() for name in size.names})
    for case in spec.cases if dims else ():
        deadline.check()
        for dim in dims:
            _scan(program, sized, case, dim)
    sizes = hidden(spec, seed, LARGEST)
    inputs, wide = draw(spec, sizes, seed), unrounded(program)

    def outputs(at: Mapping[str, float]) -> list[Tensor]:
        def resized(index: int, arguments: Sequence[Any], value: Tensor) -> Tensor:
            return torch.full_like(value, sized[index].value(at)) if index in sized else value

        return list(interpret(wide, inputs, resized, sizes).values())

    for case in spec.cases if dims else ():
        deadline.check()
        usual = outputs(case.sizes)
        for factor in NEARBY:
            for changed in (*([dim] for dim in dims), dims):
                beside = outputs({d: n * factor if d in changed else n for d, n in case.sizes.items()})
                change = max(_change(a, b) for a, b in zip(usual, beside, strict=True))
                if change > max(factor, 1 / factor) ** STEEPEST - 1 + NOISE:
                    raise Failed(
                        "size_choice",
                        f"outputs jump with {', '.join(changed)} at case {case.name}: by {change:.2g} of "
                        f"their RMS where sizes change by {abs(factor - 1):.2g}; use sizes as a mean does",
                    )


def _scan(program: Program, sized: Mapping[int, Dim], case: Case, dim: str) -> None:
    """Raise Failed if a scalar that depends only on sizes jumps. The scalar is computed for every size of one
    dim, up to twice the dim's size in the case. The other dims have their sizes in the case."""
    extents = torch.arange(SMALLEST, 2 * case.sizes[dim] + SMALLEST, dtype=torch.float64)
    values: dict[int, Tensor] = {}
    used: set[int] = set()  # nodes with at least one reader that depends on more than sizes
    for index, node in enumerate(program.nodes):
        made = OPERATIONS[node.op].torch
        if index in sized:
            size = torch.as_tensor(sized[index].value({**case.sizes, dim: extents}), dtype=torch.float64)
            values[index] = size.expand_as(extents)
        elif node.op == "constant":
            values[index] = torch.full_like(extents, float(node.attribute or 0))
        elif made and node.args and values.keys() >= set(node.args):
            values[index] = made(torch, *(values[a] for a in node.args))
        else:
            used.update(node.args)
    for index in used & values.keys():
        before, after = values[index][:-1], values[index][1:]
        allowed = (1 + 1 / extents[:-1]) ** STEEPEST - 1
        jumps = (after - before).abs() > allowed * torch.minimum(before.abs(), after.abs()) + NOISE**2
        if jumps.any():
            at = int(extents[1:][jumps][0])
            raise Failed(
                "size_choice",
                f"a scalar made of sizes jumps where {dim} is {at} and other sizes are those of case "
                f"{case.name}; use sizes as a mean does",
            )


def _change(a: Tensor, b: Tensor) -> float:
    """The RMS of the difference of two tensors, divided by the smaller RMS of the two. Only values that are
    finite in both tensors count. Returns 0 if there are no such values."""
    usable = a.isfinite() & b.isfinite()
    a, b = a[usable].double(), b[usable].double()
    least = min(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / max(least, 1e-300) if a.numel() and not torch.equal(a, b) else 0.0
