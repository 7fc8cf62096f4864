"""Choose a plan for a backward: which values to store or recompute, and how to simplify its expressions.

``Search.weighed`` computes a plan's costs at the requested sizes. Plans are compared by these costs in order:
bytes stored above the limit, FLOPs of matmuls, recomputed sums, all bytes. The search changes one choice at a
time, and stops when no change makes the plan cheaper.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

from coda_agent.primitives.derive import ledger
from coda_agent.primitives.derive.arrange import (
    LEAVES,
    NEXT,
    BackwardPlan,
    BackwardRequest,
    Derived,
    PlannedBackward,
)
from coda_agent.primitives.derive.ledger import Traffic
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import TensorType

Cost = tuple[float, ...]
REFUSED: Cost = (float("inf"),)
NEXT_SIZE = 2048  # the size of the dim NEXT if ``sizes`` does not contain NEXT


def all_sizes(derived: Derived, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all dims: the dims of the forward, and the dims that only the backward has."""
    return {**sizes, **{name: size(sizes) for name, size in derived.widths.items()}}


class Search:
    """Finds the cheapest plan. ``limit``: the most bytes per row that the forward may store for the backward,
    not counting the forward's inputs. Without a limit, the forward stores only its outputs. If these do not
    suffice to derive a backward, the forward stores more values. ``fixed``: forward nodes that must (True) or
    must not (False) be stored."""

    def __init__(
        self, request: BackwardRequest, sizes: Mapping[str, int], limit: int | None, fixed: Mapping[int, bool]
    ):
        self.request, self.limit, self.fixed = request, limit, fixed
        self.sizes = {NEXT: NEXT_SIZE, **sizes}
        self.program, self.types = request.program, request.program.types()
        shapes = [tensor.shape for tensor in self.program.signature.outputs.values()]
        self.rows = next((s for s in shapes if len(s) == 2), shapes[0])[0](self.sizes)
        self.tried: dict[BackwardPlan, tuple[Cost, Derived | None]] = {}
        self.traffic: list[Traffic] = []
        self.wanted: dict[BackwardPlan, set[int]] = {}  # the forward nodes whose values each backward needs
        self.refusals: list[ProgramError] = []

    def best(self) -> Derived:
        """Return the backward of the cheapest plan. Raises ProgramError if no plan works, or if all plans
        that work exceed the limit."""
        returned = {i for i in self.program.outputs.values() if self.types[i].kind in LEAVES}
        more = {*self.candidates()} - returned
        free = returned if self.limit is None else returned | more
        ends = [self.descend(returned, free)]
        if self.limit is not None:
            ends.append(self.descend(returned | more, free, largest=True))
            if min(map(self.cost, ends))[0]:
                ends.append(self.descend(set(), free))
            ends += self.swaps(min(ends, key=self.cost), free)
            ends += self.arranged(min(ends, key=self.cost))
        elif self.cost(ends[0]) == REFUSED:
            ends.append(self.descend(returned | more, more))
        cost, derived = self.tried[min(ends, key=self.cost)]
        if derived is None:
            raise self.refusals[0]
        if self.limit is not None and cost[0]:
            raise ProgramError(
                "save_bytes",
                f"no backward stores at most {self.limit} bytes a row: the smallest that was found stores "
                f"{int(cost[0]) + self.limit}",
            )
        self.cost(BackwardPlan(frozenset(returned | more), True, True))
        return derived._replace(bound=Traffic(*map(min, zip(*self.traffic, strict=True))))

    def candidates(self) -> Iterator[int]:
        """Yield the nodes that may be worth storing: matmuls, their operands, and vectors spread over
        tiles."""
        for index, node in enumerate(self.program.nodes):
            if node.op == "gemm":
                yield index
                for operand in node.args[:2]:
                    own = self.program.nodes[operand]
                    source = own.args[0] if own.op == "transpose" else operand
                    if self.program.nodes[source].op != "input":
                        yield source
            if node.op in ("per_row", "per_column") and self.program.nodes[node.args[0]].op != "input":
                yield node.args[0]

    def descend(self, stored: set[int], free: set[int], largest: bool = False) -> BackwardPlan:
        """Start from the plan that stores the nodes ``stored``, and improve this plan one change at a time. A
        change switches a simplification on or off, or changes whether a node of ``free`` is stored. Small
        tensors are tried first; with ``largest``, large tensors are tried first."""
        always = {i for i, keep in self.fixed.items() if keep}
        start = {i for i in stored if self.fixed.get(i, True)} | always
        order = sorted(free - self.fixed.keys(), key=lambda i: (self.bytes(i), i), reverse=largest)
        best, plan = BackwardPlan(frozenset(start)), None
        while best != plan:
            plan = best = min(self.arranged(best), key=self.cost)
            for index in order:
                if index in self.wanted[best]:  # storing a value that the backward does not read is useless
                    best = min(best, best._replace(stored=best.stored ^ {index}), key=self.cost)
        return best

    def swaps(self, plan: BackwardPlan, free: set[int]) -> list[BackwardPlan]:
        """Variants of a plan that store one tile in place of another and stay within the limit."""
        able = {i for i in self.wanted[plan] & free - self.fixed.keys() if self.types[i].kind == "tile"}
        derived = self.tried[plan][1]
        room = (self.limit or 0) - self.stored_bytes(derived) if derived else 0
        pairs = itertools.product(able & plan.stored, able - plan.stored)
        fits = (p for p in pairs if self.bytes(p[1]) - self.bytes(p[0]) <= room * self.rows)
        return [plan._replace(stored=plan.stored ^ set(pair)) for pair in fits]

    def bytes(self, index: int) -> int:
        """The bytes of a node's tensor in memory."""
        tensor = TensorType(self.types[index].shape, "fp32" if self.types[index].kind == "vector" else "bf16")
        return ledger.size([tensor], self.sizes)

    def arranged(self, plan: BackwardPlan) -> list[BackwardPlan]:
        return [plan._replace(moves=m, turns=t) for m in (True, False) for t in (True, False)]

    def cost(self, plan: BackwardPlan) -> Cost:
        if plan not in self.tried:
            attempt = PlannedBackward(self.request, plan)
            try:
                derived = attempt.derive()
                result: tuple[Cost, Derived | None] = self.weighed(derived), derived
            except ProgramError as error:
                self.refusals.append(error)
                result = REFUSED, None
            # If a simplification had no effect, turning it off gives the same backward.
            for moves in {plan.moves, plan.moves and "moves" in attempt.used}:
                for turns in {plan.turns, plan.turns and "turns" in attempt.used}:
                    same = plan._replace(moves=moves, turns=turns)
                    self.tried.setdefault(same, result)
                    self.wanted.setdefault(same, attempt.wanted)
        return self.tried[plan][0]

    def weighed(self, derived: Derived) -> Cost:
        """Return a backward's costs, the most important cost first: bytes per row above the limit; FLOPs;
        number of recomputed row or column sums; all bytes; number of nodes. Without a limit, the first cost
        is the bytes per row that the forward stores only for the backward."""
        traffic = ledger.count(derived.program, derived.head, all_sizes(derived, self.sizes))
        self.traffic.append(traffic)
        extra = self.stored_bytes(derived, derived.saves)
        first = extra if self.limit is None else max(0, self.stored_bytes(derived) - self.limit)
        parts = [p for p in (derived.program, derived.head) if p]
        sums = sum(self.types[i].kind == "vector" for i in derived.recomputed.values())
        return first, traffic.flops, sums, traffic.moved + extra * self.rows, sum(len(p.nodes) for p in parts)

    def stored_bytes(self, derived: Derived, names: Collection[str] | None = None) -> int:
        """Bytes per row that the forward stores and the backward reads. ``names``: count only these
        values."""
        parts = [p for p in (derived.program, derived.head) if p]
        read = {n: t for p in parts for n, t in p.signature.inputs.items()}
        sizes = all_sizes(derived, self.sizes)
        chosen = [*self.program.signature.outputs, *derived.saves] if names is None else names
        return sum(ledger.size([read[n]], sizes) // self.rows for n in chosen if n in read)


def forced(program: Program, save: Collection[str], recompute: Collection[str]) -> dict[int, bool]:
    """Map each node that ``save`` names to True (it must be stored), and each node that ``recompute`` names
    to False (it must not be stored). The names are names of outputs, or nodes such as ``node 3``. Raises
    ProgramError for an unknown name, or for a node that cannot be stored."""
    storage: dict[int, bool] = {}
    for names, keep in ((save, True), (recompute, False)):
        for name in names:
            number = name.removeprefix("node").strip()
            if name in program.outputs:
                index = program.outputs[name]
            elif number.isdecimal() and int(number) < len(program.nodes):
                index = int(number)
            else:
                known = ", ".join(program.outputs)
                raise ProgramError("save", f"there is no output or node {name!r}; outputs are {known}")
            if program.types()[index].kind not in LEAVES or program.nodes[index].op == "input":
                raise ProgramError("save", f"{name!r} is no tile or vector that the forward computes")
            if storage.setdefault(index, keep) is not keep:
                raise ProgramError("save", f"{name!r} is to be stored, and not to be: leave one out")
    return storage
