"""Check that each side of each choice in a program matters on some tried input.

A choice takes one of two values, its sides. A side that no tried input selects is a blind spot: for example,
a clamp beyond the drawn values looks like no clamp. So each side must be *needed*: there must be inputs on
which the program passes the error gate, but fails if the other side is forced. A function like sigmoid counts
as a choice too, because it is nearly constant far from zero, and nearly a straight line close to zero. For
example, 1e9 * tanh(v / 1e9) is almost v for usual values, and acts as a clamp for huge values. So the program
must fail on some inputs if the function is replaced by its limits, and on some inputs if the function is
replaced by its tangent at zero.

A ``where`` may also choose between two correct forms of a value, such as a series near zero and 1 - exp(-t).
Near zero, 1 - exp(-t) cancels. The gate may still accept 1 - exp(-t) near zero, because the gate's limits
allow for the errors of larger values, or because the reference cancels too. Then no input needs the series.
Instead, the side of the series must be *judged*: the program must fail if only the values of this side are
wrong, by an eighth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coda_agent.primitives.lang.ir import OPERATIONS, Operation, Program

SHARE = 1 / 256  # the error gate may miss a change in fewer elements than this share of a choice's elements
SIDES = {
    "where": ("its condition never holds", "its condition always holds"),
    "maximum": ("its first argument is never the larger", "its second argument is never the larger"),
    "minimum": ("its first argument is never the smaller", "its second argument is never the smaller"),
    "abs": ("its argument is never positive", "its argument is never negative"),
    "row_select": ("it never selects from the first half", "it never selects from the second half"),
    **dict.fromkeys(
        ("row_max", "row_abs_max", "column_max", "column_abs_max", "head_abs_max"),
        ("it is never in the first half", "it is never in the second half"),
    ),
}
OFF = 9 / 8  # a factor for a side's values; the error gate must notice this change
ALIKE = 2.0**-10  # relative difference up to which two forms of a value count as equal
BEND = 16.0  # for arguments beyond this, functions with a limit are within half an fp32 ulp of their limit
STRAIGHT = 2.0**-8  # for arguments up to this, functions with a limit are nearly their tangents at zero
STEP = 2.0**-16  # step of the finite difference that gives a tangent's slope, in fp64
LIMITED = ("its argument is always far from zero", "its argument is always near zero, where it is straight")
COMPARED = ("it never holds", "it always holds")


class Side(NamedTuple):
    """One side of a choice: the choice's node, and 0 for the first side or 1 for the second."""

    node: int
    side: int

    def unused(self, program: Program) -> str:
        """A message for the author: why this side decides nothing."""
        op = program.nodes[self.node].op
        return (LIMITED if OPERATIONS[op].limit else SIDES.get(op, COMPARED))[self.side]


class Count(NamedTuple):
    """Numbers of elements of a choice in one run. ``decided``: the elements that take the value of one side.
    ``apart``: those of the ``decided`` elements for which the other side has another value. ``elements``: all
    elements."""

    decided: int
    apart: int
    elements: int


@dataclass
class Seen:
    """The evidence on a side from all runs. ``share``: the share of the choice's elements that the side
    decided, in the run with the largest share. ``family``: the family of inputs in that run."""

    share: float = 0.0
    family: str = ""
    needed: str = ""  # the family of inputs on which the program failed without this side
    tries: int = 0  # the number of runs in which the program was also tried without this side
    apart: bool = False  # whether the two sides' values ever differed where this side decided
    judged: bool = False  # whether a run failed because this side alone was distorted


@dataclass
class Coverage:
    """Every side of every choice, with the evidence from the judged runs."""

    program: Program
    seen: dict[Side, Seen] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = {side: Seen() for node in choices(self.program) for side in self._of(node)}

    def _of(self, node: int) -> list[Side]:
        return [Side(node, 0), Side(node, 1)]

    @property
    def open(self) -> list[Side]:
        """The sides that no run has needed yet."""
        return [side for side, seen in self.seen.items() if not seen.needed]

    def add(self, counts: Mapping[Side, Count], family: str) -> None:
        """Add a judged run's counts."""
        for side, count in counts.items():
            if side not in self.seen:
                continue
            seen, share = self.seen[side], count.decided / max(count.elements, 1)
            seen.apart |= count.apart > 0
            if share > seen.share:
                seen.share, seen.family = share, family

    def unexercised(self) -> list[Side]:
        """The sides that no run needed or judged.

        The sides of a choice between two forms of one value are left out, except if the choice is a
        comparison that is used in arithmetic.
        """
        return [side for side in self.open if not self._alike(side.node) and not self.seen[side].judged]

    def forms(self, side: Side) -> bool:
        """Whether the choice may be between two forms of one value, and this side decided enough elements to
        be judged."""
        return self.program.nodes[side.node].op == "where" and self.seen[side].share >= SHARE

    def _alike(self, node: int) -> bool:
        """Whether a choice is between two forms of one value: both sides decided enough elements, and their
        values were always equal. Always False for a comparison."""
        compares = self.program.nodes[node].op not in SIDES
        sides = [self.seen[side] for side in self._of(node)]
        return not compares and all(seen.share >= SHARE and not seen.apart for seen in sides)

    def table(self) -> list[dict[str, Any]]:
        """The choices, as a report lists them."""
        return [
            {
                "node": node,
                "op": self.program.nodes[node].op,
                "sides": [
                    {
                        "share": round(seen.share, 4),
                        "family": seen.needed or seen.family,
                        "needed": bool(seen.needed),
                    }
                    for seen in map(self.seen.__getitem__, self._of(node))
                ],
            }
            for node in choices(self.program)
        ]


def choices(program: Program) -> list[int]:
    """The nodes that are choices. A comparison that is only the condition of a ``where`` counts as part of
    the ``where``."""
    readers: dict[int, list[bool]] = {}
    for node in program.nodes:
        for place, argument in enumerate(node.args):
            readers.setdefault(argument, []).append(node.op == "where" and place == 0)
    return [
        index
        for index, node in enumerate(program.nodes)
        if OPERATIONS[node.op].limit
        or OPERATIONS[node.op].sides
        and (node.op in SIDES or not all(readers.get(index, [False])))
    ]


class Counting:
    """A callback for the interpreter that counts the elements that each side decides."""

    def __init__(self, program: Program, sides: Sequence[Side]):
        self.program, self.nodes = program, {side.node for side in sides}
        self.counts: dict[Side, Count] = {}

    def __call__(self, index: int, arguments: Sequence[Any], value: Tensor) -> Tensor:
        if index in self.nodes:
            sides = _sides(self.program, index, arguments)
            both = (torch.as_tensor(given, dtype=value.dtype) for _, given in sides)
            one, other = torch.broadcast_tensors(*both)  # isclose of PyTorch 2.11 does not broadcast
            differ = ~torch.isclose(one, other, rtol=ALIKE, atol=0, equal_nan=True).expand(value.shape)
            for side, (mask, _) in enumerate(sides):
                mask = mask.expand(value.shape)
                apart = int((mask & differ).sum())
                self.counts[Side(index, side)] = Count(int(mask.sum()), apart, mask.numel())
        return value


class Forcing:
    """A callback for the interpreter that removes one side: the choice always returns the other side's
    value."""

    def __init__(self, program: Program, side: Side):
        self.program, self.side = program, side

    def __call__(self, index: int, arguments: Sequence[Any], value: Tensor) -> Tensor:
        if index != self.side.node:
            return value
        _, other = _sides(self.program, index, arguments)[1 - self.side.side]
        return torch.as_tensor(other, dtype=value.dtype, device=value.device).expand(value.shape)


class Distorting(Forcing):
    """A callback for the interpreter that multiplies one side's values by ``OFF``."""

    def __call__(self, index: int, arguments: Sequence[Any], value: Tensor) -> Tensor:
        if index != self.side.node:
            return value
        mask, _ = _sides(self.program, index, arguments)[self.side.side]
        return torch.where(mask, value * OFF, value)


def _sides(program: Program, index: int, arguments: Sequence[Any]) -> Any:
    operation = OPERATIONS[program.nodes[index].op]
    if operation.limit:
        (value,) = arguments
        size = value.abs()
        return (size < BEND, _tangent(operation, value)), (size > STRAIGHT, operation.limit(torch, value))
    sides = operation.sides
    assert sides is not None  # callers ask only about choices
    return sides(torch, *arguments)


def _tangent(operation: Operation, value: Tensor) -> Tensor:
    """The tangent at zero of a function with a limit."""
    assert operation.torch is not None
    low, middle, high = operation.torch(torch, torch.tensor([-STEP, 0.0, STEP], dtype=torch.float64)).tolist()
    return middle + (high - low) / (2 * STEP) * value
