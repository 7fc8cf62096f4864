"""Which backward of many: what is stored and what is computed again, and which products its sums ride on.

Plans are compared by the ledger: FLOPs of products first, then sums that are done again, then the bytes that
grow with the rows, then all bytes. The search changes one choice at a time, as long as that helps.
"""

from __future__ import annotations

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

Cost = tuple[float, ...]
REFUSED: Cost = (float("inf"),)


def all_sizes(derived: Derived, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the forward's dims, and of those that only the backward has."""
    return {**sizes, **{name: size(sizes) for name, size in derived.widths.items()}}


class Search:
    """``limit``: bytes a row that may be stored for the backward beside the forward's inputs; without one the
    forward stores what it returns, and more only where no backward does without. ``fixed``: whether forward
    nodes must be stored, or must not."""

    def __init__(
        self, asked: BackwardRequest, sizes: Mapping[str, int], limit: int | None, fixed: Mapping[int, bool]
    ):
        self.asked, self.limit, self.fixed = asked, limit, fixed
        self.sizes = {NEXT: max(sizes.values()), **sizes}
        self.program, self.types = asked.program, asked.program.types()
        self.tried: dict[BackwardPlan, tuple[Cost, Derived | None]] = {}
        self.wanted: dict[BackwardPlan, set[int]] = {}  # forward nodes whose values a backward asks for
        self.refusals: list[ProgramError] = []

    def best(self) -> Derived:
        """The cheapest plan; ProgramError where there is none."""
        returned = {i for i in self.program.outputs.values() if self.types[i].kind in LEAVES}
        more = {*self.candidates()} - returned
        free = returned if self.limit is None else returned | more
        starts = [returned, returned | more] if self.limit is not None else [returned]
        ends = [self.descend(start, free) for start in starts]
        if self.limit is None and self.cost(ends[0]) == REFUSED:
            ends.append(self.descend(returned | more, more))
        elif self.limit is not None and min(map(self.cost, ends))[0]:
            ends.append(self.descend(set(), free))
        cost, derived = min((self.tried[plan] for plan in ends), key=lambda each: each[0])
        if derived is None:
            raise self.refusals[0]
        if self.limit is not None and cost[0]:
            raise ProgramError(
                "save_bytes",
                f"no backward stores at most {self.limit} bytes a row: the least that was found is "
                f"{int(cost[0]) + self.limit}",
            )
        self.cost(BackwardPlan(frozenset(returned | more), True, True))
        ledgers = [self.ledger(d) for _, d in self.tried.values() if d]
        return derived._replace(bound=Traffic(*map(min, zip(*ledgers, strict=True))))

    def candidates(self) -> Iterator[int]:
        """Values that a backward may want stored: products, operands of products, and finished vectors."""
        for index, node in enumerate(self.program.nodes):
            if node.op == "gemm":
                yield index
                for operand in node.args:
                    own = self.program.nodes[operand]
                    source = own.args[0] if own.op == "transpose" else operand
                    if self.program.nodes[source].op != "input":
                        yield source
            if node.op in ("per_row", "per_column") and self.program.nodes[node.args[0]].op != "input":
                yield node.args[0]

    def descend(self, stored: set[int], free: set[int]) -> BackwardPlan:
        """From a plan that stores these, by changes of one choice: of the arrangement, or of ``free``."""
        kept = {i for i in stored if self.fixed.get(i, True)} | {i for i, keep in self.fixed.items() if keep}
        plan = min(self.arranged(BackwardPlan(frozenset(kept))), key=self.cost)
        while True:
            able = sorted(self.wanted[plan] & free - self.fixed.keys())  # any other changes nothing
            near = [plan._replace(stored=plan.stored ^ {index}) for index in able]
            best = min((plan, *near), key=self.cost)
            best = min(self.arranged(best), key=self.cost)
            if self.cost(best) >= self.cost(plan):
                return plan
            plan = best

    def arranged(self, plan: BackwardPlan) -> list[BackwardPlan]:
        return [plan._replace(moves=m, turns=t) for m in (True, False) for t in (True, False)]

    def cost(self, plan: BackwardPlan) -> Cost:
        if plan not in self.tried:
            attempt = PlannedBackward(self.asked, plan)
            try:
                derived = attempt.derive()
                found: tuple[Cost, Derived | None] = self.weighed(derived), derived
            except ProgramError as error:
                self.refusals.append(error)
                found = REFUSED, None
            for moves in {plan.moves, plan.moves and "moves" in attempt.used}:  # the same, if nothing moved
                for turns in {plan.turns, plan.turns and "turns" in attempt.used}:
                    same = plan._replace(moves=moves, turns=turns)
                    self.tried.setdefault(same, found)
                    self.wanted.setdefault(same, attempt.wanted)
        return self.tried[plan][0]

    def weighed(self, derived: Derived) -> Cost:
        """Bytes above the limit, or that the forward stores for this alone; FLOPs; sums over rows or columns
        that are done again; bytes that grow with the rows; all bytes; nodes."""
        rows = self.program.signature.outputs[next(iter(self.program.outputs))].shape[0]
        now = self.ledger(derived)
        twice = self.ledger(derived, {n: 2 * self.sizes[n] for n in rows.names})
        extra = sum(self.kept(derived, derived.saves))
        if self.limit is None:
            first = extra
        else:
            named = self.program.signature.outputs
            first = max(0, sum(self.kept(derived, [*named, *derived.saves])) - self.limit)
        grown = (twice.moved - now.moved) // rows(self.sizes) + extra
        parts = [p for p in (derived.program, derived.head) if p]
        sums = sum(self.types[i].kind == "vector" for i in derived.recomputed.values())
        return first, now.flops, sums, grown, now.moved, sum(len(p.nodes) for p in parts)

    def kept(self, derived: Derived, names: Collection[str]) -> Iterator[int]:
        """Bytes a row of each of these that the backward reads."""
        rows = self.program.signature.outputs[next(iter(self.program.outputs))].shape[0](self.sizes)
        parts = [p for p in (derived.program, derived.head) if p]
        read = {n: t for p in parts for n, t in p.signature.inputs.items()}
        for name in names:
            if name in read:
                yield ledger.size([read[name]], all_sizes(derived, self.sizes)) // rows

    def ledger(self, derived: Derived, other: Mapping[str, int] = {}) -> Traffic:
        return ledger.count(derived.program, derived.head, all_sizes(derived, {**self.sizes, **other}))


def forced(program: Program, save: Collection[str], recompute: Collection[str]) -> dict[int, bool]:
    """Nodes by whether they must be stored: named as outputs are, or by number, as ``node 3``."""
    found: dict[int, bool] = {}
    for names, keep in ((save, True), (recompute, False)):
        for name in names:
            number = name.removeprefix("node").strip()
            if name in program.outputs:
                index = program.outputs[name]
            elif number.isdigit() and int(number) < len(program.nodes):
                index = int(number)
            else:
                known = ", ".join(program.outputs)
                raise ProgramError("save", f"there is no output or node {name!r}; outputs are {known}")
            if program.types()[index].kind not in LEAVES or program.nodes[index].op == "input":
                raise ProgramError("save", f"{name!r} is no tile or vector that the forward computes")
            found[index] = keep
    return found


