"""Build the backward of one plan: the program of matmuls, and the pointwise head that runs before this
program."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from coda_agent.primitives.derive.ledger import Traffic
from coda_agent.primitives.derive.reverse import Reverse
from coda_agent.primitives.derive.simplify import Simplifier, reached
from coda_agent.primitives.lang.dims import Dim, Unsolvable, solving_order
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Node, Program, reduction, sizes_named
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Signature, TensorType
from coda_agent.primitives.lang.trace import tracing

NEXT = "NEXT"  # a dim that only the inputs ``d_next`` and ``w_next`` have
LEAVES = ("tile", "vector")
UNUSED = "no output uses it"


class Derived(NamedTuple):
    """A derived backward, with facts about the backward.

    ``program``: the matmuls with their epilogues. ``head``: the pointwise part, which runs before
    ``program``. ``same``: maps a gradient to the input or other gradient that it equals. ``folds``: the
    gradients that the backward does not finish. Each is mapped to the output of the backward that the caller
    must sum to get the gradient. The caller sums over all elements for the gradient of a scalar, otherwise
    over heads. ``stored``: the forward's inputs, outputs and saved values that the backward reads. ``saves``:
    maps each saved value to its forward node. The forward does not return saved values yet, and must be
    changed to return them. ``recomputed``: the forward's matmuls, reductions and outputs that the backward
    computes again, with their forward nodes. ``left``: maps each input without a derived gradient to the
    reason. ``notes``: operations where gradients stop, or where the derivative is one choice of several.
    ``widths``: maps new dims to sizes of the forward. A new dim replaces a size such as H*P, if the shapes of
    the backward's inputs do not determine H and P. ``bound``: for each kind of cost, the lowest value of all
    compared plans.
    """

    program: Program | None
    head: Program | None
    same: dict[str, str]
    folds: dict[str, str]
    stored: tuple[str, ...]
    saves: dict[str, int]
    recomputed: dict[str, int]
    left: dict[str, str]
    notes: tuple[str, ...]
    widths: dict[str, Dim]
    bound: Traffic = Traffic(0, 0, 0)


class BackwardRequest(NamedTuple):
    """A request for a backward. Each field means the same as the argument of ``derive`` with the same
    name."""

    program: Program
    wrt: tuple[str, ...]
    of: tuple[str, ...]
    behind: str | None = None
    positive: tuple[str, ...] = ()
    accumulate: tuple[str, ...] = ()


class BackwardPlan(NamedTuple):
    """A plan for a backward. ``stored``: the forward nodes whose values are in memory. ``moves``: whether
    ``Simplifier`` moves row factors out of matmuls. ``turns``: whether ``Simplifier`` computes sums over one
    matmul's result from another matmul."""

    stored: frozenset[int]
    moves: bool = False
    turns: bool = False


class PlannedBackward:
    """Builds the backward of one plan."""

    def __init__(self, request: BackwardRequest, plan: BackwardPlan):
        self.request, self.plan = request, plan
        self.program, self.types = request.program, request.program.types()
        signature = self.program.signature
        self.narrow = next(
            (t.dtype for t in signature.inputs.values() if len(t.shape) == 2 and t.dtype != "fp32"), "bf16"
        )
        self.inputs = signature.inputs | signature.outputs
        names = {i: n for n, i in self.program.outputs.items()}
        self.saves = {self.declare(f"saved_{i}", i): i for i in sorted(plan.stored) if i not in names}
        self.stored = {i: n for i, n in names.items() if i in plan.stored}
        self.stored |= {i: n for n, i in self.saves.items()}
        self.widths: dict[str, Dim] = {}
        self.updates: dict[str, str] = {}
        self.used: set[str] = set()  # see ``Simplifier``
        self.wanted: set[int] = set()  # forward nodes whose values the backward needs

    def declare(self, name: str, index: int) -> str:
        """Add to the backward an input with the shape of a forward value; return the input's name."""
        kind = self.types[index]
        return self.announce(name, TensorType(kind.shape, "fp32" if kind.kind == "vector" else self.narrow))

    def announce(self, name: str, tensor: TensorType) -> str:
        """Add an input to the backward, and return the input's name. This is ``name``, with underscores
        appended if another tensor has that name."""
        while name in self.inputs:
            name += "_"
        self.inputs[name] = tensor
        return name

    def derive(self) -> Derived:
        request, nodes = self.request, self.program.outputs
        incoming = {n: self.declare(f"d_{n}", nodes[n]) for n in request.of}
        trace = Simplifier(self.signature(), self.plan.moves)
        self.used = trace.used
        reverse = Reverse(self.program, trace, self.stored, request.positive)
        with tracing(trace):
            known: dict[int, int] = {}
            for output, name in incoming.items():
                index, node = nodes[output], Node("input", (), name)
                if output == request.behind:
                    pair = [trace.add(Node("input", (), n)) for n in ("d_next", "w_next")]
                    node = Node("gemm", tuple(pair))
                gradient = trace.add(node)
                if index in known:  # another output is the same value
                    gradient = trace.add(Node("add", (known[index], gradient)))
                known[index] = gradient
            gradients = reverse.gradients(known, request.wrt)
            self.wanted = set(reverse.known)
        if not gradients:
            unreached = "no differentiable path leads from it to an output: change --of or --wrt"
            why = next(iter(reverse.stopped.values()), unreached)
            raise ProgramError("wrt", f"no gradient of {', '.join(request.wrt)}: {why}")
        outputs, folds = self.outputs(trace, gradients)
        again = {i: reverse.known[i] for i in reverse.again}
        if self.plan.turns:
            outputs, again = trace.turn(outputs, again)
        outputs = {n: self.accumulated(trace, n, i) for n, i in outputs.items()}
        recomputed = self.again(trace, outputs, again)
        return self.split(trace, outputs, reverse)._replace(folds=folds, recomputed=recomputed)

    def signature(self) -> Signature:
        """The signature of all inputs that the backward may read."""
        own, dims = self.program.signature, self.program.signature.dims
        if self.request.behind:
            rows, columns = own.outputs[self.request.behind].shape
            self.inputs["d_next"] = TensorType((rows, Dim.parse(NEXT)), self.narrow)
            self.inputs["w_next"] = TensorType((Dim.parse(NEXT), columns), self.narrow)
            dims = (*dims, NEXT)
        for name in self.request.accumulate:
            whole = TensorType(own.inputs[name].shape, "fp32")
            self.updates[f"d_{name}"] = self.announce(f"sum_{name}", whole)
        return Signature(f"{own.name}_backward", dims, self.inputs, {}, static=own.static, only=own.only)

    def outputs(
        self, trace: Simplifier, gradients: Mapping[str, int]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Return the backward's outputs by name, and the value of ``Derived.folds``."""
        outputs: dict[str, int] = {}
        folds: dict[str, str] = {}
        for name, index in gradients.items():
            own = f"d_{name}"
            if trace.types[index].shape != self.program.signature.inputs[name].shape:
                folds[own] = f"{own}_parts"
            outputs[folds.get(own, own)] = index
        return outputs, folds

    def accumulated(self, trace: Simplifier, name: str, index: int) -> int:
        """Return the node that adds a gradient to its buffer. If there is no buffer, return the gradient's
        node unchanged."""
        if name not in self.updates:
            return index
        if not self.late(trace)[index]:
            raise ProgramError("accumulate", f"no matmul computes {name}, so none can add it to a buffer")
        if trace.types[index].kind == "experts":
            raise ProgramError(
                "accumulate",
                f"{name} has a matrix for each expert, which a kernel cannot add: add it afterwards",
            )
        return trace.add(Node("add", (trace.add(Node("input", (), self.updates[name])), index)))

    def again(
        self, trace: Simplifier, outputs: Mapping[str, int], known: Mapping[int, int]
    ) -> dict[str, int]:
        """Return the value of ``Derived.recomputed``. ``known``: maps recomputed forward nodes to nodes of
        the trace."""
        needed = set(reached(trace.nodes, outputs.values()))
        names = {i: n for n, i in self.program.outputs.items()}
        named = {i for i, n in enumerate(self.program.nodes) if n.op == "gemm" or reduction(n)} | names.keys()
        return {names.get(i, f"node {i}"): i for i in sorted(named & known.keys()) if known[i] in needed}

    # Head and matmuls

    def split(self, trace: Simplifier, gradients: dict[str, int], reverse: Reverse) -> Derived:
        same, outputs = self.aliases(trace, gradients)
        left = {
            name: next((reverse.stopped[i] for i in self.at(name) if i in reverse.stopped), UNUSED)
            for name in self.request.wrt
            if not gradients.keys() & {f"d_{name}", f"d_{name}_parts"}
        }
        late = self.late(trace)
        head = program = None
        refusal: ProgramError | None = None
        operands = self.operands(trace, outputs, late)
        sums = self.sums(trace, outputs, late)
        tried: list[dict[int, str]] = []
        for roots in ({}, operands, sums, operands | sums, self.frontier(trace, outputs, late)):
            if roots in tried:
                continue
            tried.append(roots)
            try:
                program = self.products(trace, outputs, roots, late)
                head = self.part(trace, f"{trace.signature.name}_head", {n: i for i, n in roots.items()}, {})
                refusal = None
                break
            except ProgramError as error:
                refusal = refusal or error
        if refusal:
            raise refusal
        parts = [p for p in (program, head) if p]
        read = {n for p in parts for n in p.signature.inputs}
        own = self.program.signature
        return Derived(
            program,
            head,
            same,
            {},
            tuple(n for n in (*own.inputs, *own.outputs, *self.saves) if n in read),
            {n: i for n, i in self.saves.items() if n in read},
            {},
            left,
            tuple(dict.fromkeys(reverse.notes)),
            self.widths,
        )

    def at(self, name: str) -> list[int]:
        return [i for i, n in enumerate(self.program.nodes) if n.op == "input" and n.attribute == name]

    def aliases(self, trace: Simplifier, outputs: dict[str, int]) -> tuple[dict[str, str], dict[str, int]]:
        """Split the gradients into two dicts. The first dict maps a gradient to the input or other gradient
        that it equals. The second dict has the remaining gradients, with their nodes."""
        same: dict[str, str] = {}
        rest: dict[int, str] = {}
        for name, index in outputs.items():
            node = trace.nodes[index]
            if node.op == "input":
                same[name] = str(node.attribute)
            elif index in rest:
                same[name] = rest[index]
            else:
                rest[index] = name
        return same, {n: i for i, n in rest.items()}

    def late(self, trace: Simplifier) -> list[bool]:
        """For each node of the trace, whether it depends on a matmul."""
        late: list[bool] = []
        for node in trace.nodes:
            late.append(node.op == "gemm" or any(late[a] for a in node.args))
        return late

    def operands(self, trace: Simplifier, outputs: dict[str, int], late: list[bool]) -> dict[int, str]:
        """Find nodes that the head can compute, because they depend on no matmul: outputs, and operands of
        matmuls. Return the nodes' names by node."""
        roots = {i: n for n, i in outputs.items() if not late[i]}
        for index in reached(trace.nodes, outputs.values()):
            if trace.nodes[index].op == "gemm":
                for operand in trace.nodes[index].args[:2]:
                    node = trace.nodes[operand]
                    source = node.args[0] if node.op == "transpose" else operand
                    if not late[source] and trace.nodes[source].op != "input":
                        roots.setdefault(source, f"head_{source}")
        return roots

    def sums(self, trace: Simplifier, outputs: dict[str, int], late: list[bool]) -> dict[int, str]:
        """Find nodes that the head can compute, because they depend on no matmul: outputs, and vectors
        computed from reductions. A vector is included only if a node of another kind reads it. Return the
        nodes' names by node."""
        summed: list[bool] = []
        for index, node in enumerate(trace.nodes):
            own = reduction(node) is not None or any(summed[a] for a in node.args)
            summed.append(own and not late[index] and trace.types[index].kind == "vector")
        others = (i for i in reached(trace.nodes, outputs.values()) if not summed[i])
        roots = {a: f"head_{a}" for i in others for a in trace.nodes[i].args if summed[a]}
        return roots | {i: n for n, i in outputs.items() if not late[i]}

    def frontier(self, trace: Simplifier, outputs: dict[str, int], late: list[bool]) -> dict[int, str]:
        """Find nodes that the head can compute, because they depend on no matmul: outputs, and arguments of
        nodes that depend on a matmul. An argument that the head cannot store is replaced by its own
        arguments. Return the nodes' names by node."""
        roots = {i: n for n, i in outputs.items() if not late[i]}
        pending = [a for i in reached(trace.nodes, outputs.values()) if late[i] for a in trace.nodes[i].args]
        while pending:
            index = pending.pop()
            node = trace.nodes[index]
            if late[index] or node.op in ("input", "constant", "dim") or trace.types[index].kind == "scalar":
                continue
            if trace.types[index].kind in LEAVES and node.op not in ("column_index", "as_tile"):
                roots.setdefault(index, f"head_{index}")
            else:
                pending += node.args
        return roots

    def products(
        self, trace: Simplifier, outputs: dict[str, int], roots: dict[int, str], late: list[bool]
    ) -> Program | None:
        """The program of matmuls. It computes the ``outputs`` that are not in ``roots``. ``roots``: the nodes
        that the head computes. Return None if the head computes all outputs. Raises ProgramError if no kernel
        can run the program."""
        mine = {n: i for n, i in outputs.items() if i not in roots}
        program = self.part(trace, trace.signature.name, mine, roots)
        if program:
            cut(program)
            signature = program.signature
            try:
                solving_order(signature.shapes, signature.dims, signature.named)
            except Unsolvable as error:
                raise ProgramError("dim", f"{error} that the backward reads: widen --wrt") from None
        return program

    def part(
        self, trace: Simplifier, name: str, outputs: dict[str, int], inputs: dict[int, str]
    ) -> Program | None:
        """The program that computes ``outputs``; None if ``outputs`` is empty. ``inputs``: nodes that the
        program reads as inputs, instead of computing them."""
        if not outputs:
            return None
        nodes: list[Node] = []
        place: dict[int, int] = {}
        read: dict[str, TensorType] = {}
        for index in reached(trace.nodes, outputs.values(), inputs):
            node = trace.nodes[index]
            if index in inputs:
                node = Node("input", (), inputs[index])
                read[inputs[index]] = self.tensor(trace, inputs[index], index)
            elif node.op == "input":
                read[str(node.attribute)] = self.inputs[str(node.attribute)]
            place[index] = len(nodes)
            nodes.append(Node(node.op, tuple(place[a] for a in node.args), node.attribute))
        written = {n: self.tensor(trace, n, i) for n, i in outputs.items()}
        sizes = [Dim.parse(str(n.attribute)) for n in nodes if n.op == "dim"]
        sizes += [Dim.parse(size) for n in nodes for size in sizes_named(n)]
        inner = {d for dim in sizes for d in dim.names}
        tensors = {**read, **written}
        if all(n.op != "per_head" for n in nodes):
            tensors = self.solvable(trace.signature.dims, read, tensors, inner)
        names = {d for t in tensors.values() for dim in t.shape for d in dim.names} | inner
        signature = Signature(
            name,
            tuple(d for d in (*trace.signature.dims, *self.widths) if d in names),
            {n: tensors[n] for n in sorted(read)},
            {n: tensors[n] for n in written},
            static=tuple(d for d in trace.signature.static if d in names),
            only={d: sizes for d, sizes in trace.signature.only.items() if d in names},
            updates={n: self.updates[n] for n in written if n in self.updates},
        )
        return Program(signature, tuple(nodes), {n: place[i] for n, i in outputs.items()}).check()

    def solvable(
        self,
        dims: tuple[str, ...],
        read: Mapping[str, TensorType],
        tensors: dict[str, TensorType],
        inner: set[str],
    ) -> dict[str, TensorType]:
        """Make the dims solvable from the inputs' shapes. If these shapes do not determine all dims, use new
        dims for sizes such as 2*H*P in the shapes of ``tensors``. A size is replaced only if two or more of
        its dims are outside ``inner``, the dims in the attributes of nodes."""
        shapes = {n: tensors[n].shape for n in read}
        known = {d for s in shapes.values() for dim in s for d in dim.names}
        try:
            solving_order(shapes, [d for d in dims if d in known])
            return tensors
        except Unsolvable:
            pass
        fresh: dict[Dim, Dim] = {}
        sizes = {dim for tensor in tensors.values() for dim in tensor.shape}
        for dim in sorted((d for d in sizes if len(d.names - inner) > 1), key=str):
            base, times = dim, 1
            with suppress(ValueError):
                while True:
                    base, times = base.divided(Dim.parse(2)), 2 * times
            known_as = {b: n for n, b in self.widths.items()}
            name = known_as.get(base, f"W{len(self.widths)}")
            self.widths[name] = base
            fresh[dim] = Dim.parse(f"{times}*{name}")
        return {n: t._replace(shape=tuple(fresh.get(d, d) for d in t.shape)) for n, t in tensors.items()}

    def tensor(self, trace: Simplifier, name: str, index: int) -> TensorType:
        kind = trace.types[index]
        wide = kind.kind == "vector" or name in self.updates
        return TensorType(kind.shape, "fp32" if wide else self.narrow)
