"""Reverse-mode differentiation: compute the gradients of a program's inputs from the gradients of its
outputs, as nodes of a trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coda_agent.primitives.derive.simplify import Simplifier
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Node, Program, reduction
from coda_agent.primitives.lang.signature import Type
from coda_agent.primitives.lang.trace import Tensor, apply

ALIKE = ("negative", "even", "odd", "transpose", "row_sums", "per_row", "head_sums", "per_head", "as_tile")
SUMS = ("add", "subtract", "join")


class Reverse:
    """Adds forward values and gradients to one trace.

    ``stored``: maps each forward node whose value is in memory to the name of the input that holds the value.
    ``known``: maps forward nodes to nodes of the trace. ``stopped``: maps each forward node with an
    incomplete gradient to the reason. ``notes``: caveats of operations that a gradient passes through.
    """

    def __init__(
        self, program: Program, trace: Simplifier, stored: Mapping[int, str], positive: Collection[str]
    ):
        self.program, self.nodes, self.types = program, program.nodes, program.types()
        self.trace, self.stored, self.positive = trace, dict(stored), positive
        self.stored |= {i: str(n.attribute) for i, n in enumerate(self.nodes) if n.op == "input"}
        self.known: dict[int, int] = {}
        self.again: set[int] = set()  # the forward nodes in ``known`` that are recomputed
        self.stopped: dict[int, str] = {}
        self.notes: list[str] = []
        self.given: Collection[int] = ()

    # Forward values

    def value(self, index: int) -> int:
        """Return the trace's node for a forward value. The backward reads the value, recovers it from a
        stored value, or computes it again."""
        if index not in self.known:
            if index in self.stored:
                self.known[index] = self.trace.add(Node("input", (), self.stored[index]))
            elif self.cheap(index) or (recovered := self.solved(index)) is None:
                node = self.nodes[index]
                self.again.add(index)
                self.known[index] = self.trace.add(
                    Node(node.op, tuple(self.value(a) for a in node.args), node.attribute)
                )
            else:
                self.known[index] = recovered
        return self.known[index]

    def cheap(self, index: int) -> bool:
        """Whether a value is stored, or can be recomputed from stored values without a matmul or
        reduction."""
        node = self.nodes[index]
        if index in self.stored:
            return True
        return node.op != "gemm" and not reduction(node) and all(map(self.cheap, node.args))

    def solved(self, index: int) -> int | None:
        """Recover a value from a stored value, by removing a term, a factor or a sign. For example, recover x
        from x + y. Return None if no stored value allows this."""
        for reader, node in enumerate(self.nodes):
            if index not in node.args or node.op not in ("add", "subtract", "multiply", "negative"):
                continue
            others = [a for a in node.args if a != index]
            if self.types[reader] != self.types[index] or len(others) != len(node.args) - 1:
                continue
            if not all(map(self.cheap, others)) or (node.op == "multiply" and not self.nonzero(others[0])):
                continue
            result = self.value(reader) if reader in self.stored else self.solved(reader)
            if result is None:
                continue
            if node.op == "negative":
                return self.trace.add(Node("negative", (result,)))
            other = self.value(others[0])
            if node.op == "subtract" and node.args[1] == index:
                return self.trace.add(Node("subtract", (other, result)))
            inverse = {"add": "subtract", "subtract": "add", "multiply": "divide"}[node.op]
            return self.trace.add(Node(inverse, (result, other)))
        return None

    def nonzero(self, index: int) -> bool:
        """Whether a value is certainly never zero."""
        node = self.nodes[index]
        if node.op == "constant":
            return node.attribute != 0
        if node.op == "input":
            return node.attribute in self.positive
        return (
            node.op in ("rsqrt", "dim")  # exp and sigmoid are not here: they underflow to zero
            or node.op in ("per_row", "per_column", "per_head", "multiply", "divide", "sqrt")
            and all(map(self.nonzero, node.args))
        )

    # Gradients

    def gradients(self, given: Mapping[int, int], wrt: Collection[str]) -> dict[str, int]:
        """Return the gradients of the inputs ``wrt`` by name. Incomplete gradients are left out. ``given``:
        maps forward nodes to their known gradients."""
        active, self.given = self.active(wrt), given.keys()
        found: dict[int, dict[Type, int]] = {i: {} for i in range(len(self.nodes))}
        for index, gradient in given.items():
            self.collect(found, index, gradient)
        for index in range(len(self.nodes) - 1, -1, -1):
            if index in active and self.nodes[index].args:
                for total in found[index].values():
                    self.pass_on(index, total, active, found)
        complete: dict[str, int] = {}
        for index, totals in found.items():
            if self.nodes[index].op == "input" and index in active and totals and index not in self.stopped:
                if len(totals) > 1:
                    self.stop([index], "its parts are sums over different sizes", active)
                else:
                    complete[str(self.nodes[index].attribute)] = next(iter(totals.values()))
        return complete

    def active(self, wrt: Collection[str]) -> set[int]:
        """The nodes that depend on the inputs ``wrt``."""
        dependent: set[int] = set()
        for index, node in enumerate(self.nodes):
            if (node.op == "input" and node.attribute in wrt) or dependent.intersection(node.args):
                dependent.add(index)
        return dependent

    def collect(self, found: dict[int, dict[Type, int]], index: int, gradient: int) -> None:
        """Add a gradient to a node's total. Gradients of different types have separate totals."""
        kind = self.trace.types[gradient]
        before = found[index].get(kind)
        found[index][kind] = gradient if before is None else self.trace.add(Node("add", (before, gradient)))

    def pass_on(self, index: int, total: int, active: set[int], found: dict[int, dict[Type, int]]) -> None:
        """Apply a node's derivative rule to the node's total gradient, and add the results to its arguments'
        gradients."""
        node = self.nodes[index]
        rule = OPERATIONS[node.op].derivative
        if node.op == "per_row" and (early := self.early(index, found)) is not None:
            self.collect(found, node.args[0], early)
            return
        wanted = [a for a in node.args if a in active]
        if caveat := OPERATIONS[node.op].caveat:
            self.notes.append(f"{node.op}: {caveat}")
        if rule is None:
            return
        try:
            parts = rule(*(Tensor(i) for i in (total, self.value(index), *map(self.value, node.args))))
        except ProgramError as error:
            if error.code != "derivative" and self.trace.types[total] == self.types[index]:
                raise
            self.stop(wanted, error.message, active)
            return
        for argument, part in zip(node.args, parts, strict=True):
            if argument in active and part is not None:
                if self.types[argument].kind == "scalar" and part._type.kind != "scalar":
                    if part._type.kind not in ("tile", "vector"):
                        self.stop([argument], f"{part._type} sums to no scalar", active)
                        continue
                    part = apply("row_sums", part) if part._type.kind == "tile" else part
                self.collect(found, argument, part._index)

    # Scales of rows

    def early(self, index: int, found: Mapping[int, Mapping[Type, int]]) -> int | None:
        """Compute the gradient of a row scale from stored values, instead of recomputing other values. The
        stored values must be homogeneous in the scale. Then Euler's theorem holds: for a value of degree k in
        the scale, the scale times the value's derivative by the scale equals k times the value. Return None
        if there are no such stored values, or if the ordinary rule needs no recomputed matmul or
        reduction."""
        if all(map(self.cheap, self.nodes[index].args + self.beside(index))):
            return None
        (scale,) = self.nodes[index].args
        ends = self.ends(index, found) if self.nonzero(scale) else None
        if not ends:
            return None
        total: Tensor | None = None
        for end, degree in ends.items():
            (gradient,) = found[end].values()
            part = apply("multiply", Tensor(gradient), Tensor(self.value(end)))
            part = apply("row_sums", part) if self.types[end].kind == "tile" else part
            part = part if degree == 1 else apply("multiply", part, degree)
            total = part if total is None else apply("add", total, part)
        return apply("divide", total, Tensor(self.value(scale)))._index

    def beside(self, index: int) -> tuple[int, ...]:
        """The other arguments of all nodes that read the value ``index``."""
        return tuple(a for node in self.nodes if index in node.args for a in node.args if a != index)

    def ends(self, index: int, found: Mapping[int, Mapping[Type, int]]) -> dict[int, int] | None:
        """Follow all paths from a row scale towards the nodes with given gradients. Return the first stored
        value on each path, and this value's degree in the scale. Return None if a path has no stored value.
        Also return None if a value before the stored one is not homogeneous in the scale."""
        degrees, ends = {index: 1}, dict[int, int]()
        for reader in range(index + 1, len(self.nodes)):
            node = self.nodes[reader]
            if not found[reader] or not degrees.keys() & set(node.args):
                continue
            degree = self.degree(node, [degrees.get(a, 0) for a in node.args])
            stored = reader in self.stored
            if degree is None or len(found[reader]) > 1 or (reader in self.given and not stored):
                return None
            (ends if stored else degrees)[reader] = degree
        return ends

    def degree(self, node: Node, given: list[int]) -> int | None:
        """Return the degree of a node's value in a row scale; None if the value may not be homogeneous in the
        scale. ``given``: the degrees of the node's arguments."""
        if node.op in ALIKE:
            return given[0]
        if node.op in SUMS and given[0] == given[1]:
            return given[0]
        if node.op in ("multiply", "divide"):
            return given[0] + given[1] * (1 if node.op == "multiply" else -1)
        if node.op == "where" and not given[0] and given[1] == given[2]:
            return given[1]
        if node.op == "gemm" and not given[1] and self.nodes[node.args[0]].op != "transpose":
            return given[0]
        return None

    def stop(self, arguments: list[int], why: str, active: set[int]) -> None:
        """Record that the gradients of the nodes ``arguments`` are incomplete, and so are the gradients of
        all nodes on which these nodes depend."""
        pending = list(arguments)
        while pending:
            index = pending.pop()
            self.stopped.setdefault(index, why)
            pending += [a for a in self.nodes[index].args if a in active]
