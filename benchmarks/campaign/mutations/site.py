"""The site of a mutation: a graph, methods that choose at random in the graph, and a record of what the
mutant's conditions test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.campaign.graph import Graph, Skip, meeting
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.ir import OPERATIONS
from coda_agent.verifier.spec.model import Spec

VALUES = ("tile", "vector", "head", "row", "column", "spread", "repeated", "scalar")
LARGEST = 3e38  # the largest threshold
COMPARISONS = ("greater", "greater_equal", "less", "less_equal")
Edit = Callable[["Site"], str]


@dataclass
class Site:
    """A graph to mutate. ``scales``: the largest magnitude of each node on inputs drawn by the spec's own
    init. ``aims``: pairs of a node and a number with which a condition of the mutant compares the node's
    values. ``sizes``: the sizes that a mutant's conditions test."""

    spec: Spec
    graph: Graph
    random: Random
    scales: Sequence[float]
    aims: list[tuple[int, float]] = field(default_factory=list)
    sizes: list[Mapping[str, int]] = field(default_factory=list)

    def node(self, *ops: str) -> int:
        """A random node of the program with one of these operations."""
        return self.choice([i for i, n in enumerate(self.graph.program.nodes) if n.op in ops])

    def value(self, *kinds: str) -> int:
        """A random value of the program that is neither a constant nor a size."""
        found = self.graph.originals(*(kinds or VALUES))
        return self.choice([i for i in found if self.graph.nodes[i].op not in ("constant", "dim")])

    def choice(self, among: Sequence[int]) -> int:
        if not among:
            raise Skip("it has no such node")
        return self.random.choice(among)

    def threshold(self, index: int) -> float:
        """Draw a threshold for a node's values, and record the node and the threshold in ``aims``. The
        threshold may lie inside the usual range of the values, or far outside this range."""
        inside, outside, anywhere = (-1.5, 0.5), (0.3, 6.0), (-12.0, 30.0)
        span = self.random.choices((inside, outside, anywhere), (4, 5, 1))[0]
        size = self.scales[index] if span is not anywhere else 1.0
        value = min(size * 10 ** self.random.uniform(*span), LARGEST)
        value *= self.random.choice((-1, 1))
        self.aims.append((index, value))
        return value

    def put(self, old: int, new: int) -> None:
        """Redirect all readers of a node, or one random reader, to another node."""
        readers = self.graph.readers(old)
        if readers and self.random.random() < 0.4:
            self.graph.rewire(*self.random.choice(readers), new)
        else:
            self.graph.replace(old, new)

    def add(self, op: str, *args: int | float) -> int:
        """Add a node whose arguments are nodes (int) and numbers (float)."""
        lifted = (self.graph.constant(a) if isinstance(a, float) else a for a in args)
        return self.graph.add(op, *lifted)

    def meets(self, index: int) -> int:
        """Return node ``index`` itself, or a random other node, which may be a broadcast vector. The other
        node has a compatible shape, and does not depend on node ``index``."""
        return meeting(self.graph, index, self.random)

    def known(self, index: int) -> int:
        """Return the node to record in ``aims``. If node ``index`` belongs to the original program, this is
        node ``index``. Otherwise, node ``index`` was added to broadcast a vector, and the vector's node is
        returned."""
        if index < self.graph.first_added:
            return index
        return self.graph.nodes[index].args[0]

    def condition(self, target: int) -> tuple[int, str]:
        """Add a comparison between a threshold and a value whose shape is compatible with the target's.
        Return the comparison's node and a description."""
        value, how = self.meets(target), self.random.choice(COMPARISONS)
        limit = self.threshold(self.known(value))
        return self.add(how, value, limit), f"{self.name(value)} {how} {limit:.4g}"

    def bump(self, gap: int, width: float) -> int:
        """Add width / (gap**2 + width), which is 1 where the gap is zero."""
        return self.add("divide", width, self.add("add", self.add("multiply", gap, gap), width))

    def wrong(self, target: int) -> int:
        """Add a wrong version of a value."""
        constant = self.random.choice((0.0, 1.0, -1.0))
        match self.random.randrange(6):
            case 0:
                return self.add("multiply", target, 0.0)
            case 1:
                return self.add("negative", target)
            case 2:
                return self.add("multiply", target, 2.0)
            case 3:
                return self.add("multiply", target, 1.02)
            case 4:
                return self.add("add", target, constant or 0.5)
        return self.add("multiply", target, target)

    def name(self, index: int) -> str:
        """A node as text. An input, size or constant appears by its name or value. Any other node appears by
        its operation, with the broadcast vector or the node's number."""
        node = self.graph.nodes[index]
        if node.op in ("input", "constant", "dim"):
            return str(node.attribute)
        if OPERATIONS[node.op].spread:
            return f"{node.op}({self.name(node.args[0])})"
        return f"{node.op}#{index}"

    def case(self) -> Mapping[str, int]:
        return self.random.choice(self.spec.cases).sizes

    def dim(self) -> Dim:
        """One of the spec's dims, or sometimes the product of two dims."""
        names = list(self.spec.dims)
        found = Dim.parse(self.random.choice(names))
        return found * Dim.parse(self.random.choice(names)) if self.random.random() < 0.15 else found
