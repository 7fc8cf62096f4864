"""Programs: kernels as data. A program is a flat typed graph that serialises to JSON.

A node is an operation over earlier nodes. The operation's typing rule derives a node's type from its
arguments' types, so building a program from untrusted JSON also checks the program. A program does not
contain its partition into steps; ``partition`` computes it. This module needs only the standard library,
because the jail (the process that traces a kernel file) imports it. The classes are named tuples, because
dataclasses would take a third of the jail's time.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from coda_agent.primitives.lang.cutedsl import Reduction, Spread, Statistic
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.schedule import Schedule, by_step, schedules_json
from coda_agent.primitives.lang.signature import (
    EIGHTS,
    INDICES,
    OPERANDS,
    Signature,
    TensorType,
    Type,
    check_output_names,
    check_output_type,
)

STEP = re.compile(r"0|[1-9][0-9]{0,2}")
MAX_NODES = 512
MAX_BYTES = 1 << 20
FORMAT = 2


Attribute = str | float | None


class Node(NamedTuple):
    """One operation: its name, its argument nodes and an attribute. The attribute of a leaf is an input's
    name, a size or a constant. The attribute of any other operation is the text of its sizes, or None."""

    op: str
    args: tuple[int, ...] = ()
    attribute: Attribute = None

    @property
    def offsets(self) -> int | None:
        """The argument of a GEMM that holds the experts' offsets. None if the node has no offsets."""
        return self.args[2] if self.op == "gemm" and len(self.args) > 2 else None

    @property
    def row_index(self) -> int | None:
        """The argument of a GEMM that holds the numbers of the rows to gather. None if the node has no such
        argument."""
        return self.args[3] if self.op == "gemm" and len(self.args) > 3 else None


class Operation(NamedTuple):
    """The definition of an operation: its typing rule, PyTorch function and CuTeDSL code.

    ``torch`` takes (torch, *values, *sizes) and returns a value. ``cute`` is a code template over fp32
    register values ``{0}``, ``{1}``. ``fast`` is a less exact template, for values on which only bf16 and fp8
    outputs depend. ``lanes`` replaces ``cute`` for an operation that needs no instruction. The function
    ``lanes`` takes the code of each argument's lanes and returns the code of the result's lanes. ``at``: a
    code template that computes the value from a lane's position in the tile. ``reads``: the operation uses
    the values of its first ``reads`` arguments, and only the shapes of the other arguments. If ``reads`` is
    None, the operation uses all values. ``sizes``: the number of sizes in the attribute.

    ``sides`` is for an operation that chooses between two values, such as ``maximum``. It takes (torch,
    *values) and returns two pairs of a mask and a value. A mask marks the elements where the pair's value is
    chosen. ``limit`` is for a function that approaches a simpler function far from zero, as tanh approaches
    the sign. It takes (torch, value) and returns the value of the simpler function. ``derivative`` takes
    traced values: the result's gradient, the result and the arguments. It returns the gradient of each
    argument, or None for a gradient that is zero everywhere. If the operation broadcasts an argument, the
    argument's gradient may have the result's shape. An operation without a derivative stops gradients.
    ``caveat``: why there is no derivative, or where the derivative is one choice of several.
    """

    name: str
    infer: Callable[[tuple[Type, ...], Attribute], Type]
    torch: Callable[..., Any] | None = None
    cute: str | None = None
    fast: str | None = None
    lanes: Callable[..., list[str]] | None = None
    at: str = ""
    reads: int | None = None
    sizes: int = 0
    reduction: Reduction | None = None
    statistic: Statistic | None = None
    spread: Spread | None = None
    sides: Callable[..., Sides] | None = None
    limit: Callable[..., Any] | None = None
    derivative: Derivative | None = None
    caveat: str = ""


Derivative = Callable[..., tuple[Any, ...]]
Sides = tuple[tuple[Any, Any], tuple[Any, Any]]
OPERATIONS: dict[str, Operation] = {}
LEAVES = ("input", "constant", "dim")
# kinds of values in the registers of one step
IN_STEP = ("tile", "range", "experts", "head", "spread", "repeated")


def reduction(node: Node) -> Reduction | None:
    """Return how a node reduces a tile to a vector; None if the node is not a reduction."""
    return OPERATIONS[node.op].reduction


def sizes_named(node: Node) -> tuple[str, ...]:
    """The sizes that an operation takes besides its arguments."""
    return tuple(str(node.attribute).split(", ")) if OPERATIONS[node.op].sizes else ()


def register(operation: Operation) -> Operation:
    """Add an operation to the vocabulary. Each name may be added once."""
    if operation.name in OPERATIONS:
        raise ValueError(f"operation {operation.name!r} is defined twice")
    OPERATIONS[operation.name] = operation
    return operation


class Program(NamedTuple):
    """A kernel: its signature, its nodes in topological order, the nodes of its outputs by name, and the
    schedules of some steps."""

    signature: Signature
    nodes: tuple[Node, ...]
    outputs: dict[str, int]
    schedule: Mapping[int, Schedule] = {}

    def __hash__(self) -> int:
        return hash((self.nodes, tuple(self.outputs)))

    def input_tensor(self, index: int) -> TensorType | None:
        """The tensor of an input node; None for other nodes."""
        node = self.nodes[index]
        return self.signature.inputs[str(node.attribute)] if node.op == "input" else None

    def types(self) -> tuple[Type, ...]:
        """Each node's type. Raises ProgramError if an operation does not accept its arguments."""
        return _types(self)

    def check(self, lines: Sequence[int | None] | None = None) -> Program:
        """Check types, outputs and limits; return self. Raises ProgramError, with a line if known."""
        if len(self.nodes) > MAX_NODES:
            raise ProgramError("size", f"{len(self.nodes)} nodes; at most {MAX_NODES} are allowed")
        types = self.types()
        for index, node in enumerate(self.nodes):
            for size in (str(node.attribute),) if node.op == "dim" else sizes_named(node):
                self._check_size(index, size)
            self._check_reading(node, lines[index] if lines else None)
        self._check_choices(types, lines)
        check_output_names(self.outputs, self.signature)
        gemms = sum(node.op == "gemm" for node in self.nodes)
        if not all(0 <= step < gemms for step in self.schedule):
            raise ProgramError(
                "schedule",
                f"schedules for steps {sorted(self.schedule)}, but there are {gemms} steps, from 0",
            )
        for name, index in self.outputs.items():
            if not 0 <= index < len(types):
                raise ProgramError("graph", f"output {name!r} names node {index}, which is not there")
            check_output_type(name, types[index], self.signature)
        self._check_use()
        return self

    def _check_size(self, index: int, text: str) -> None:
        """Check that a size uses the spec's dims in canonical spelling, because its text is hashed."""
        size = Dim.parse(text)
        if not size.names <= set(self.signature.dims):
            raise ProgramError("dim", f"node {index}: {text!r} has dims that the spec does not declare")
        if str(size) != text:
            raise ProgramError("dim", f"node {index}: the size {text!r} is written {str(size)!r}")

    def _check_reading(self, node: Node, line: int | None) -> None:
        """Check that only gemm reads fp8, and that indices and offsets are inputs with an integer dtype."""
        for argument in node.args:
            dtype = self._input_dtype(argument)
            if dtype in EIGHTS and (dtype not in OPERANDS or node.op not in ("gemm", "transpose")):
                name = self.nodes[argument].attribute
                raise ProgramError(
                    "dtype",
                    f"input {name!r} is {dtype}: only gemm reads that; scale its product instead",
                    line,
                )
        if node.offsets is not None and self._input_dtype(node.offsets) != "int32":
            raise ProgramError("dtype", "gemm's offsets are an input of int32, [E + 1]", line)
        if node.row_index is not None and self._input_dtype(node.row_index) != "int32":
            raise ProgramError("dtype", "gemm's index is an input of int32, [M]", line)
        if (how := reduction(node)) and how.selects and self._input_dtype(node.args[1]) not in INDICES:
            raise ProgramError(
                "dtype", f"{node.op}'s index is an input of {' or '.join(INDICES)}, one value a row", line
            )

    def _input_dtype(self, index: int) -> str | None:
        tensor = self.input_tensor(index)
        return tensor.dtype if tensor else None

    def _check_choices(self, types: Sequence[Type], lines: Sequence[int | None] | None) -> None:
        """Check that every choice depends on an input's values. With a choice that depends only on sizes and
        literals, a kernel could compute different functions at different sizes."""
        fixed: set[int] = set()
        for index, node in enumerate(self.nodes):
            if node.op == "input" or types[index].kind != "scalar" or not fixed.issuperset(node.args):
                continue
            if OPERATIONS[node.op].sides:
                raise ProgramError(
                    "size_choice",
                    f"{node.op} of sizes and literals alone: a kernel must compute the same function at "
                    "every size",
                    lines[index] if lines else None,
                )
            fixed.add(index)

    def _check_use(self) -> None:
        """Check that some output depends on each node, because an unused gemm would become a step without
        purpose."""
        used = set(self.outputs.values())
        for index in range(len(self.nodes) - 1, -1, -1):
            if index not in used:
                raise ProgramError("graph", f"no output depends on node {index} ({self.nodes[index].op})")
            used.update(self.nodes[index].args)

    def to_json(self) -> str:
        """Write canonical JSON: equal programs have equal bytes."""
        data = {
            "format": FORMAT,
            "signature": self.signature.to_json(),
            "nodes": [[n.op, list(n.args), _encode(n.attribute)] for n in self.nodes],
            "outputs": dict(sorted(self.outputs.items())),
            "schedule": schedules_json(self.schedule),
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"

    @property
    def hash(self) -> str:
        import hashlib  # imported here, because it takes 2 ms and the jail never hashes

        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str, signature: Signature | None = None) -> Program:
        """Parse untrusted JSON and check its size, operations and types. If ``signature`` is given, the
        program's signature must equal it."""
        if len(text.encode("utf-8", "replace")) > MAX_BYTES:
            raise ProgramError("size", f"a program of more than {MAX_BYTES} bytes")
        data = _load(text)
        if not isinstance(data, dict) or set(data) != {"format", "signature", "nodes", "outputs", "schedule"}:
            raise ProgramError("json", "a program has exactly format, signature, nodes, outputs, schedule")
        if type(data["format"]) is not int or data["format"] != FORMAT:
            raise ProgramError(
                "format", f"format {data['format']!r}; this version reads {FORMAT}: trace it again"
            )
        if signature is None:
            signature = Signature.from_json(data["signature"])
        elif data["signature"] != signature.to_json():
            name = data["signature"].get("name") if isinstance(data["signature"], dict) else None
            other = f"another version of spec {signature.name!r}: trace it again"
            if isinstance(name, str) and name != signature.name:
                other = f"spec {name[:80]!r}, not {signature.name!r}"
            raise ProgramError("signature", f"the program was made for {other}")
        if not isinstance(data["nodes"], list) or len(data["nodes"]) > MAX_NODES:
            raise ProgramError("size", f"a program is a list of at most {MAX_NODES} nodes")
        nodes = tuple(_node(i, raw) for i, raw in enumerate(data["nodes"]))
        return cls(signature, nodes, _outputs(data["outputs"]), _schedules(data["schedule"])).check()


@functools.lru_cache(maxsize=256)
def _types(program: Program) -> tuple[Type, ...]:
    known: list[Type] = []
    for index, node in enumerate(program.nodes):
        operation = OPERATIONS.get(node.op)
        if operation is None:
            raise ProgramError("operation", f"node {index}: there is no operation {node.op!r}")
        if any(not 0 <= a < index for a in node.args):
            raise ProgramError(
                "graph", f"node {index} reads {list(node.args)}: only earlier nodes can be read"
            )
        if node.attribute is not None and node.op not in LEAVES and not operation.sizes:
            raise ProgramError(
                "arguments", f"node {index}: {node.op} names nothing, but has {node.attribute!r}"
            )
        if node.op == "input":
            known.append(_input_type(program.signature, node))
        else:
            known.append(operation.infer(tuple(known[a] for a in node.args), node.attribute))
    return tuple(known)


def _input_type(signature: Signature, node: Node) -> Type:
    tensor = signature.inputs.get(node.attribute) if isinstance(node.attribute, str) else None
    if tensor is None or node.args:
        raise ProgramError(
            "input", f"{node.attribute!r} is no input; the spec has {', '.join(signature.inputs)}"
        )
    return tensor.type()


def _encode(attribute: Attribute) -> str | list[str] | None:
    return ["float", attribute.hex()] if isinstance(attribute, float) else attribute


def _load(text: str) -> Any:
    def refuse(value: str) -> None:
        raise ValueError(f"non-finite number {value}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({k for k, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ProgramError("json", f"the program is not valid JSON: {error}") from None


def _node(index: int, raw: Any) -> Node:
    try:
        op, args, attribute = raw
        if isinstance(attribute, list):
            tag, value = attribute
            if tag != "float":
                raise ValueError(f"attribute {attribute!r}: a number is written as ['float', hexadecimal]")
            attribute = float.fromhex(value)
            if not math.isfinite(attribute):
                raise ValueError(f"constant {value!r} is not finite")
        elif not (attribute is None or isinstance(attribute, str)):
            raise ValueError(f"attribute {attribute!r}: a number is written as ['float', hexadecimal]")
        if not isinstance(op, str):
            raise ValueError(f"operation {op!r}")
        if not isinstance(args, list) or any(type(a) is not int for a in args):
            raise ValueError(f"arguments {args!r}")
    except (TypeError, ValueError, OverflowError) as error:
        raise ProgramError("json", f"node {index} is malformed: {error}") from None
    return Node(op, tuple(args), attribute)


def _outputs(raw: Any) -> dict[str, int]:
    if not isinstance(raw, dict) or any(type(v) is not int for v in raw.values()):
        raise ProgramError("json", "outputs must map names to node numbers")
    return raw


def _schedules(raw: Any) -> dict[int, Schedule]:
    if not isinstance(raw, dict) or any(
        not STEP.fullmatch(k) or not isinstance(v, dict) for k, v in raw.items()
    ):
        raise ProgramError("json", "schedule must map step numbers to fields")
    return by_step(raw)
