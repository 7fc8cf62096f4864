"""Check the operations that choose between two values (sides), such as ``where`` and ``maximum``. Removing a
side must change the result for some valid input. Also check that no result jumps at a particular size."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from random import Random
from typing import Any, Final, Literal

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import OPERATIONS, Program
from coda_agent.primitives.system import deadline
from coda_agent.verifier.gates import Failed, judge
from coda_agent.verifier.numerics.cpu_numerics import Comparison, InputSettings
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.numerics.reference import finished
from coda_agent.verifier.numerics.search import DRAWS_A_SIZE, LARGEST, SEARCHES
from coda_agent.verifier.numerics.sizes import hidden
from coda_agent.verifier.numerics.strength.choices import Counting, Coverage, Distorting, Forcing
from coda_agent.verifier.numerics.stretch import SEARCHED
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Case

NEARBY = (1 + 2**-20, 1 - 2**-12, 1 + 2**-9, 1 - 2**-6, 1 + 2**-3)  # factors by which a size changes
STEEPEST = 8  # results may grow with at most this power of a size
SMALLEST = 8  # the smallest size tried; from a smaller size, a step of 1 changes even smooth results a lot
NOISE = 1e-4  # relative change of outputs that another order of fp32 sums may cause
JOINT = 1e-6  # share of an output's RMS on which two sizes may act together
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


def searches(spec: Spec, program: Program, seed: int) -> Iterator[InputSettings]:
    """The runs of a search, which draws values near the program's constants, and near 1."""
    random = Random(seed)
    constants = {abs(float(n.attribute or 0)) for n in program.nodes if n.op == "constant"} - {0.0}
    near = dict.fromkeys(spec.drawn, (1.0, *sorted(constants)))
    for _ in range(SEARCHES // DRAWS_A_SIZE):
        sizes = hidden(spec, random.getrandbits(48), LARGEST, vary=True)
        for _ in range(DRAWS_A_SIZE):
            yield InputSettings(sizes, SEARCHED, random.getrandbits(48), near=near)


def reach(
    spec: Spec, program: Program, coverage: Coverage, seed: int, lines: Sequence[int | None] = ()
) -> None:
    """Search the spec's domain for inputs that need the open sides (the sides that no run has needed yet).
    The program is judged on these inputs as on all other inputs.

    Raises Failed if the program is wrong on such inputs, or if the search finds no inputs that need a side.
    """
    for run in searches(spec, program, seed) if coverage.open else ():
        deadline.check()
        counts = Counting(program, coverage.open)
        interpret(program, finished(spec, run.draw(spec), run.sizes), counts, run.sizes)
        if not any(count.decided for count in counts.counts.values()):
            continue
        compared = Comparison.of(spec, run)
        if len(compared.undefined) == len(spec.outputs):
            continue
        for how, errors in compared.errors(program):
            judge(errors, f"in the interpreter, {run}, outputs {how}", run._asdict())
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
    eighth power of a size does; also if two sizes act together, because a CPU can try only one long size at
    a time.
    """
    sized = {i: Dim.parse(str(n.attribute)) for i, n in enumerate(program.nodes) if n.op == "dim"}
    dims = sorted({name for size in sized.values() for name in size.names})
    for case in spec.cases if dims else ():
        deadline.check()
        for dim in dims:
            _scan(program, sized, case, dim)
    sizes = hidden(spec, seed, LARGEST)
    every = [draw(spec, sizes, seed, family=family) for family in ("normal", "tiny", "zeros") if dims]

    numbered = {i: program.types()[i].shape[1] for i, n in enumerate(program.nodes) if n.op == "column_index"}

    def outputs(inputs: Mapping[str, Tensor], at: Mapping[Size, float]) -> list[Tensor]:
        def resized(index: int, arguments: Sequence[Any], value: Tensor) -> Tensor:
            if index in numbered:
                return value * at.get(COLUMNS, 1.0)
            return torch.full_like(value, at[sized[index]]) if index in sized else value

        return list(interpret(program, inputs, resized, sizes, wide=torch.float64).values())

    columns = {name for width in numbered.values() for name in width.names}
    for case in spec.cases if dims else ():
        usual: dict[Size, float] = {size: size.value(case.sizes) for size in sized.values()}
        for width in numbered.values():
            usual[COLUMNS] = width.value(case.sizes) / width(sizes)
        for drawn in every:
            deadline.check()
            _near(partial(outputs, drawn), set(sized.values()), case)
            _together(partial(outputs, drawn), usual, columns, case)


COLUMNS: Final = "column_index"  # the factor by which column numbers are larger than those of the tensors
Size = Dim | Literal["column_index"]
Resized = Callable[[Mapping[Size, float]], list[Tensor]]  # the outputs on the same tensors with other sizes


def _near(outputs: Resized, sizes: Collection[Dim], case: Case) -> None:
    """Raise Failed if outputs jump where one or all dims have slightly other sizes than in the case."""
    dims = sorted({name for size in sizes for name in size.names})
    before = outputs({size: size.value(case.sizes) for size in sizes})
    for factor, changed in product(NEARBY, [*([dim] for dim in dims), dims]):
        beside = {d: n * factor if d in changed else n for d, n in case.sizes.items()}
        after = outputs({size: size.value(beside) for size in sizes})
        change = max(_change(a, b) for a, b in zip(before, after, strict=True))
        if change > max(factor, 1 / factor) ** STEEPEST - 1 + NOISE:
            raise Failed(
                "size_choice",
                f"outputs jump with {', '.join(changed)} at case {case.name}: by {change:.2g} of their RMS "
                f"where sizes change by {abs(factor - 1):.2g}; use sizes as a mean does",
            )


def _together(outputs: Resized, usual: Mapping[Size, float], columns: Collection[str], case: Case) -> None:
    """Raise Failed if two sizes act together: each of a formula's sizes must act alone. ``usual``: the sizes
    in the case. Column numbers count as a size, but a size that contains one of the dims ``columns`` may
    bound them."""
    for one, other in combinations(sorted(usual, key=str), 2):
        if COLUMNS in (one, other) and any(
            not isinstance(s, str) and s.names & {*columns} for s in (one, other)
        ):
            continue
        halved: list[tuple[Size, ...]] = [(), (one,), (other,), (one, other)]
        four = [outputs({s: n / 2 if s in half else n for s, n in usual.items()}) for half in halved]
        if (share := max(map(_joint, *four))) > JOINT:
            raise Failed(
                "size_choice",
                f"the sizes {one} and {other} act together at case {case.name}, on {share:.2g} of an "
                "output's RMS, which no check at one long size can judge; use each size alone, as a count, a "
                "mean or a bound",
            )


def _joint(neither: Tensor, one: Tensor, other: Tensor, both: Tensor) -> float:
    """Return the part of an output that is neither a product nor a sum of functions of one size each, as a
    share of the output's RMS. The arguments are the output where neither, one, the other, and both sizes
    change."""
    times, total = one * other / neither, one + other - neither
    off = torch.minimum((both - times).abs().nan_to_num(math.inf), (both - total).abs())
    usable = off.isfinite() & both.isfinite()
    return float(off[usable].norm() / both[usable].norm().clamp_min(1e-300))


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
