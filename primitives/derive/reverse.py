"""Reverse mode over a program: the gradients of inputs, from those of outputs, in the vocabulary itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coda_agent.primitives.derive.simplify import Simplifier
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Node, Program, Type, reduction
from coda_agent.primitives.lang.trace import Tensor

POSITIVE = ("rsqrt", "sqrt", "exp", "sigmoid")  # where they are finite


class Reverse:
    """Forward values and gradients in one trace.

    ``stored``: forward nodes that lie in memory, by the names under which the backward reads them.
    ``stopped``: nodes whose gradient is not whole, and why; ``notes``: statistics that stop gradients.
    """

    def __init__(
        self, program: Program, trace: Simplifier, stored: Mapping[int, str], positive: Collection[str]
    ):
        self.program, self.nodes, self.types = program, program.nodes, program.types()
        self.trace, self.stored, self.positive = trace, dict(stored), positive
        self.stored |= {i: str(n.attribute) for i, n in enumerate(self.nodes) if n.op == "input"}
        self.known: dict[int, int] = {}
        self.stopped: dict[int, str] = {}
        self.notes: list[str] = []

    # Forward values

    def value(self, index: int) -> int:
        """A forward value in the trace: read, solved for from what is stored, or computed again."""
        if index not in self.known:
            if index in self.stored:
                self.known[index] = self.trace.add(Node("input", (), self.stored[index]))
            elif self.cheap(index) or (found := self.solved(index)) is None:
                node = self.nodes[index]
                self.known[index] = self.trace.add(
                    Node(node.op, tuple(self.value(a) for a in node.args), node.attribute)
                )
            else:
                self.known[index] = found
        return self.known[index]

    def cheap(self, index: int) -> bool:
        """Whether computing it again takes no product and no sum over rows or columns."""
        node = self.nodes[index]
        if index in self.stored:
            return True
        return node.op != "gemm" and not reduction(node) and all(map(self.cheap, node.args))

    def solved(self, index: int) -> int | None:
        """A value from a stored one that sums, scales or negates it."""
        for reader, node in enumerate(self.nodes):
            if index not in node.args or node.op not in ("add", "subtract", "multiply", "negative"):
                continue
            others = [a for a in node.args if a != index]
            if self.types[reader] != self.types[index] or len(others) != len(node.args) - 1:
                continue
            if not all(map(self.cheap, others)) or (node.op == "multiply" and not self.nonzero(others[0])):
                continue
            whole = self.value(reader) if reader in self.stored else self.solved(reader)
            if whole is None:
                continue
            if node.op == "negative":
                return self.trace.add(Node("negative", (whole,)))
            other = self.value(others[0])
            if node.op == "subtract" and node.args[1] == index:
                return self.trace.add(Node("subtract", (other, whole)))
            inverse = {"add": "subtract", "subtract": "add", "multiply": "divide"}[node.op]
            return self.trace.add(Node(inverse, (whole, other)))
        return None

    def nonzero(self, index: int) -> bool:
        node = self.nodes[index]
        if node.op == "constant":
            return node.attribute != 0
        if node.op == "input":
            return node.attribute in self.positive
        return (
            node.op in (*POSITIVE, "dim")
            or (node.op in ("per_row", "per_column", "per_head", "multiply", "divide"))
            and all(map(self.nonzero, node.args))
        )

    # Gradients

    def gradients(self, given: Mapping[int, int], wrt: Collection[str]) -> dict[str, int]:
        """The gradients of inputs ``wrt`` by name, from those of nodes in the trace."""
        active = self.active(wrt)
        found: dict[int, dict[Type, int]] = {i: {} for i in range(len(self.nodes))}
        for index, gradient in given.items():
            self.collect(found, index, gradient)
        for index in range(len(self.nodes) - 1, -1, -1):
            if index in active and self.nodes[index].args:
                for total in found[index].values():
                    self.pass_on(index, total, active, found)
        return {
            str(self.nodes[i].attribute): next(iter(g.values()))
            for i, g in found.items()
            if self.nodes[i].op == "input" and i in active and g and i not in self.stopped
        }

    def active(self, wrt: Collection[str]) -> set[int]:
        found: set[int] = set()
        for index, node in enumerate(self.nodes):
            if (node.op == "input" and node.attribute in wrt) or found.intersection(node.args):
                found.add(index)
        return found

    def collect(self, found: dict[int, dict[Type, int]], index: int, gradient: int) -> None:
        kind = self.trace.types[gradient]
        before = found[index].get(kind)
        found[index][kind] = gradient if before is None else self.trace.add(Node("add", (before, gradient)))

    def pass_on(self, index: int, total: int, active: set[int], found: dict[int, dict[Type, int]]) -> None:
        """Add a node's gradient, by its rule, to those of its arguments."""
        node = self.nodes[index]
        rule = OPERATIONS[node.op].derivative
        wanted = [a for a in node.args if a in active]
        scalars = [a for a in wanted if self.types[a].kind == "scalar" and self.types[index].kind != "scalar"]
        self.stop(scalars, "no primitive sums all of a tile to a scalar", active)
        if rule is None:
            self.notes.append(f"{node.op} is a statistic and has no derivative: gradients stop there")
            return
        try:
            parts = rule(*(Tensor(i) for i in (total, self.value(index), *map(self.value, node.args))))
        except ProgramError as error:
            if error.code != "derivative":
                raise
            self.stop(wanted, error.message, active)
            return
        for argument, part in zip(node.args, parts, strict=True):
            if argument in active and argument not in scalars and part is not None:
                self.collect(found, argument, part._index)

    def stop(self, arguments: list[int], why: str, active: set[int]) -> None:
        """Note that these arguments, and all that they are made of, have no whole gradient."""
        pending = list(arguments)
        while pending:
            index = pending.pop()
            self.stopped.setdefault(index, why)
            pending += [a for a in self.nodes[index].args if a in active]
