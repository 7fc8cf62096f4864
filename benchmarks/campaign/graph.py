"""Edit a program's graph: add nodes, and redirect a node's readers (the nodes that use its value)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from random import Random

from benchmarks.programs import forward
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Attribute, Node, Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.ops.operators import covers
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Type
from coda_agent.primitives.system.files import ROOT, SPECS
from coda_agent.verifier.spec.model import Spec

JUDGED = ("size_choice",)  # error codes of ``Program.check`` that count as a verdict on a mutant
SPREADS = ("row", "column", "spread", "repeated")


class Skip(Exception):
    """The edit cannot be applied here."""


def correct() -> list[str]:
    """The names of all specs. Each spec has an accepted program, or at least a correct kernel in the
    tests."""
    return sorted(p.stem for p in SPECS.glob("*.yaml"))


@functools.cache
def original(name: str) -> tuple[Spec, Program]:
    """A spec and the program to mutate. This is the accepted program, or else the program of the first
    correct kernel in the tests."""
    spec, program = forward(name)
    return spec, program._replace(schedule={})


@functools.cache
def honest(name: str) -> dict[str, Program]:
    """The spec's original program under the name "accepted", and the programs of the tests' correct kernels
    by file name."""
    spec, program = original(name)
    programs = {"accepted": program}
    for path in sorted((ROOT / "tests" / "honest" / name).glob("*.py")):
        programs[path.stem] = trace_source(path.read_text(encoding="utf-8"), spec.signature())
    return programs


class Graph:
    """The nodes of a program, and the nodes that an edit adds.

    ``frozen``: fixed sizes, or None. If given, the edit adds a constant with the dim's fixed size in place of
    each ``dim`` node. So the edit behaves at all sizes as it does at the fixed sizes.
    """

    def __init__(self, program: Program, frozen: Mapping[str, int] | None = None):
        self.program, self.frozen = program, frozen
        self.nodes, self.types = list(program.nodes), list(program.types())
        self.outputs = dict(program.outputs)
        self.first_added = len(self.nodes)
        self._below = _ancestors(self.nodes)

    def add(self, op: str, *args: int, attribute: Attribute = None) -> int:
        """Return the index of a node with this operation and arguments. The node is added if no equal node
        exists. Raises ProgramError if the operation does not accept its arguments."""
        node = Node(op, args, attribute)
        if node in self.nodes:
            return self.nodes.index(node)
        if op == "input":
            kind = self.program.signature.inputs[str(attribute)].type()
        else:
            kind = OPERATIONS[op].infer(tuple(self.types[a] for a in args), attribute)
        self.nodes.append(node)
        self.types.append(kind)
        self._below.append(set(args).union(*(self._below[a] for a in args)))
        return len(self.nodes) - 1

    def constant(self, value: float) -> int:
        return self.add("constant", attribute=float(value) + 0.0)

    def dim(self, size: Dim) -> int:
        if self.frozen is not None:
            return self.constant(float(size(self.frozen)))
        return self.add("dim", attribute=str(size))

    def replace(self, old: int, new: int) -> None:
        """Redirect all readers of ``old`` to ``new``. The nodes that the edit added are not redirected."""
        for index in range(self.first_added):
            node = self.nodes[index]
            self.nodes[index] = node._replace(args=tuple(new if a == old else a for a in node.args))
        self.outputs = {name: new if i == old else i for name, i in self.outputs.items()}

    def rewire(self, reader: int, argument: int, new: int) -> None:
        """Replace one argument of a node."""
        args = list(self.nodes[reader].args)
        args[argument] = new
        self.nodes[reader] = self.nodes[reader]._replace(args=tuple(args))

    def become(self, index: int, node: Node) -> None:
        """Replace the node at ``index`` by another node."""
        self.nodes[index] = node

    def originals(self, *kinds: str) -> list[int]:
        """The program's own nodes whose type is of these kinds."""
        return [i for i in range(self.first_added) if self.types[i].kind in kinds]

    def free_of(self, index: int) -> list[int]:
        """The program's own nodes that do not depend on a node."""
        return [i for i in range(self.first_added) if i != index and index not in self._below[i]]

    def readers(self, index: int) -> list[tuple[int, int]]:
        """The program's own nodes that read a node, as pairs (reader, position of the argument)."""
        return [
            (i, k)
            for i, node in enumerate(self.nodes[: self.first_added])
            for k, a in enumerate(node.args)
            if a == index
        ]

    def finish(self) -> Program:
        """Return the edited program, after a check and a trial partition. The check allows errors with
        ``JUDGED`` codes. Raises Skip if the program is invalid or unchanged."""
        program = self._canonical()
        try:
            program.check()
        except ProgramError as error:
            if error.code not in JUDGED:
                raise Skip(error.message) from None
        try:
            cut(program)
        except ProgramError as error:
            raise Skip(error.message) from None
        if program.to_json() == Graph(self.program)._canonical().to_json():
            raise Skip("nothing changed")
        return program

    def _canonical(self) -> Program:
        """The program with only the nodes that its outputs need, numbered depth first, and with equal nodes
        merged."""
        known: dict[Node, int] = {}
        made: dict[int, int] = {}
        open_: set[int] = set()

        def visit(index: int) -> int:
            if index not in made:
                if index in open_:
                    raise Skip("a node would read itself")
                open_.add(index)
                node = self.nodes[index]
                node = node._replace(args=tuple(visit(a) for a in node.args))
                made[index] = known.setdefault(node, len(known))
            return made[index]

        outputs = {name: visit(self.outputs[name]) for name in sorted(self.outputs)}
        return Program(self.program.signature, tuple(known), outputs)


def _ancestors(nodes: list[Node]) -> list[set[int]]:
    below: list[set[int]] = []
    for node in nodes:
        below.append(set(node.args).union(*(below[a] for a in node.args)))
    return below


def same_type(graph: Graph, index: int, among: list[int]) -> list[int]:
    """The nodes of ``among`` that can replace the node ``index``, because they have the same type. Only an
    integer input can replace an integer input, and it can replace nothing else."""
    kind, whole = graph.types[index], _whole(graph, index)
    return [i for i in among if i != index and graph.types[i] == kind and _whole(graph, i) == whole]


def _whole(graph: Graph, index: int) -> bool:
    node = graph.nodes[index]
    if node.op != "input":
        return False
    return graph.program.signature.inputs[str(node.attribute)].dtype in ("int32", "int64")


def meeting(graph: Graph, index: int, random: Random) -> int:
    """Choose a random node that can be combined elementwise with the node ``index``. It may be the node
    ``index`` itself, a scalar, a node of the same type, or a node that can be spread over that type. Raises
    Skip if no node fits."""
    kind = graph.types[index]
    free = [i for i in (*graph.free_of(index), index) if graph.nodes[i].op not in ("constant", "dim")]
    made = [i for i in free if graph.types[i] == kind or graph.types[i].kind == "scalar"]
    if kind.kind == "tile":
        made += [i for i in free if _covered(kind, graph.types[i])]
        made += [s for i in free if (s := _spread(graph, i, kind)) is not None]
    if not made:
        raise Skip("nothing fits it")
    return random.choice(made)


def _covered(wide: Type, narrow: Type) -> bool:
    return narrow.kind in SPREADS and covers(wide, narrow)


def _spread(graph: Graph, index: int, wide: Type) -> int | None:
    """Return a node that spreads a vector over a tile's rows or columns; None if the vector's length fits
    neither."""
    kind = graph.types[index]
    if kind.kind != "vector":
        return None
    for axis, op in enumerate(("per_row", "per_column")):
        if kind.shape[0] == wide.shape[axis]:
            return graph.add(op, index)
    return None
