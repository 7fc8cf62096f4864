"""Symbolic tensors, whose operations only add nodes to a trace and compute nothing.

This module needs only the standard library, because the jail (the process that traces a kernel file) imports
it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coda_agent.primitives.lang import diagnostics
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import OPERATIONS, Attribute, Node
from coda_agent.primitives.lang.signature import Signature, Type

FILENAME = "<kernel>"


class KernelFunction:
    """A function marked by ``@kernel``. A kernel file defines exactly one such function."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function


def kernel(function: Callable[..., Any]) -> KernelFunction:
    """Mark the kernel function of a kernel file. The function's parameters have the names of the spec's
    inputs, constants and static dims. The function returns a dict of the spec's outputs."""
    return KernelFunction(function)


class Trace:
    """The graph of a kernel function, built while the function runs. Equal operations on equal arguments
    share a node."""

    def __init__(self, signature: Signature):
        self.signature = signature
        self.nodes: list[Node] = []
        self.types: list[Type] = []
        self.lines: list[int | None] = []
        self._known: dict[Node, int] = {}

    def add(self, node: Node) -> int:
        if node in self._known:
            return self._known[node]
        if node.op == "input":
            kind = self.signature.inputs[str(node.attribute)].type()
        else:
            kind = OPERATIONS[node.op].infer(tuple(self.types[a] for a in node.args), node.attribute)
        self.nodes.append(node)
        self.types.append(kind)
        self.lines.append(self.line())
        self._known[node] = len(self.nodes) - 1
        return self._known[node]

    def line(self) -> int | None:
        """The line of the kernel file that adds the current node, from the file's innermost stack frame. None
        if no code of the file is running."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_filename != FILENAME:
            frame = frame.f_back
        return None if frame is None else int(frame.f_lineno)


_current: Trace | None = None


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    global _current
    _current = trace
    try:
        yield
    finally:
        _current = None


def apply(op: str, *args: Any, attribute: Attribute = None) -> Tensor:
    """Add an operation on tensors and Python numbers to the current trace, and return the operation's
    result."""
    if _current is None:
        raise ProgramError("trace", f"{op}() was called outside a @kernel function")
    indices = tuple(lift(a, op)._index for a in args)
    return Tensor(_current.add(Node(op, indices, attribute)))


def lift(value: Any, op: str) -> Tensor:
    """Return an operand as a tensor. A tensor stays unchanged; a finite Python number becomes a constant."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return apply(
            "constant", attribute=number + 0.0
        )  # -0.0 becomes 0.0, because the two numbers are equal and would share a node
    raise ProgramError("argument", f"{op}: expected a tile, vector or number, got {type(value).__name__}")


def vocabulary() -> list[str]:
    """The names that a kernel file may import."""
    return list(sys.modules["coda_agent.primitives"].__all__)


class Tensor:
    """A symbolic value of a kernel: a tile, a vector, a scalar, or a vector that is spread over a tile."""

    __slots__ = ("_index",)
    __hash__ = None  # type: ignore[assignment]  # == traces a comparison, so tensors cannot be keys

    def __init__(self, index: int):
        self._index = index

    @property
    def _type(self) -> Type:
        if _current is None:
            raise ProgramError("trace", "a traced value was used after its kernel had returned")
        return _current.types[self._index]

    @property
    def mT(self) -> Tensor:
        """The transpose, for use as an operand of gemm."""
        return apply("transpose", self)

    @property
    def untransposed(self) -> Tensor | None:
        """If this tensor is a transpose, the tile that was transposed; otherwise None."""
        node = _current.nodes[self._index] if _current else None
        return Tensor(node.args[0]) if node and node.op == "transpose" else None

    @property
    def rows(self) -> Tensor:
        """The number of rows of a tile, as a scalar."""
        return self._extent(0, "rows")

    @property
    def columns(self) -> Tensor:
        """The number of columns of a tile, as a scalar."""
        return self._extent(1, "columns")

    def _extent(self, axis: int, name: str) -> Tensor:
        if self._type.kind != "tile":
            raise ProgramError("argument", f"only a tile has .{name}; this is {self._type}")
        return apply("dim", attribute=str(self._type.shape[axis]))

    def __bool__(self) -> bool:
        raise ProgramError(
            "control_flow",
            "a traced value has no truth value: choose per element with "
            "where(condition, a, b), or maximum(a, b) and minimum(a, b)",
        )

    def __iter__(self) -> Iterator[Any]:
        raise ProgramError(
            "argument", "a traced value cannot be unpacked or iterated; pairs(t) gives two tiles"
        )

    def __abs__(self) -> Tensor:
        return apply("abs", self)

    def __getitem__(self, key: Any) -> Any:
        raise ProgramError(
            "argument", "a traced value cannot be indexed: pairs(t) takes adjacent columns apart"
        )

    def __neg__(self) -> Tensor:
        return apply("negative", self)

    def __pos__(self) -> Tensor:
        return self

    def __pow__(self, exponent: Any) -> Tensor:
        if isinstance(exponent, int | float) and exponent == 2:
            return apply("multiply", self, self)
        raise ProgramError("argument", "only ** 2 exists: write products, sqrt(t) or exp(log(t) * p)")

    def __rpow__(self, base: Any) -> Tensor:
        raise ProgramError(
            "argument", "only ** 2 exists: for example, write 2 ** t as exp(0.6931471805599453 * t)"
        )

    def __invert__(self) -> Tensor:
        raise ProgramError("argument", f"~ {diagnostics.NO_OPERATOR}")

    def __float__(self) -> float:
        raise ProgramError("argument", diagnostics.NO_NUMBER)

    __int__ = __index__ = __len__ = __float__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own attribute lookups expect an AttributeError
            raise AttributeError(name)
        raise ProgramError("argument", diagnostics.no_attribute(name, vocabulary()))


def _binary(op: str) -> tuple[Callable[[Any, Any], Tensor], Callable[[Any, Any], Tensor]]:
    def forward(self: Tensor, other: Any) -> Tensor:
        return apply(op, self, other)

    def reflected(self: Tensor, other: Any) -> Tensor:
        return apply(op, other, self)

    return forward, reflected


for _name, _op in (("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide")):
    _forward, _reflected = _binary(_op)
    setattr(Tensor, f"__{_name}__", _forward)
    setattr(Tensor, f"__r{_name}__", _reflected)
for _name, _op in (
    ("gt", "greater"),
    ("ge", "greater_equal"),
    ("lt", "less"),
    ("le", "less_equal"),
    ("eq", "equal"),
    ("ne", "not_equal"),
):
    setattr(Tensor, f"__{_name}__", _binary(_op)[0])
for _name, _symbol in (
    ("matmul", "@"),
    ("mod", "%"),
    ("floordiv", "//"),
    ("and", "&"),
    ("or", "|"),
    ("xor", "^"),
    ("lshift", "<<"),
    ("rshift", ">>"),
):

    def _refuse(self: Tensor, other: Any, _symbol: str = _symbol) -> Tensor:
        raise ProgramError("argument", f"{_symbol} {diagnostics.NO_OPERATOR}")

    setattr(Tensor, f"__{_name}__", _refuse)
    setattr(Tensor, f"__r{_name}__", _refuse)


def size_of(value: Any) -> str:
    """Return a size as text. ``value``: an integer, a static dim, or an expression of integers and static
    dims with + and *."""
    if _current is not None and isinstance(value, Tensor | int) and not isinstance(value, bool):
        found = _size(_current.nodes, lift(value, "a size")._index)
        if found is not None:
            return str(found)
    raise ProgramError(
        "argument",
        "a size is made of static dims (parameters of the kernel) and whole numbers by + and *, as 2 * W",
    )


def _size(nodes: list[Node], index: int) -> Dim | None:
    """Return the polynomial over dims that a scalar node computes; None if the node computes something
    else."""
    node = nodes[index]
    if node.op == "dim":
        return Dim.parse(str(node.attribute))
    if node.op == "constant" and isinstance(node.attribute, float) and node.attribute.is_integer():
        return Dim.parse(int(node.attribute))
    parts = [_size(nodes, a) for a in node.args] if node.op in ("add", "multiply") else []
    if len(parts) == 2 and parts[0] is not None and parts[1] is not None:
        return parts[0] + parts[1] if node.op == "add" else parts[0] * parts[1]
    return None


def size_attributes(attribute: Attribute, count: int) -> list[Dim]:
    """Parse an attribute that contains ``count`` sizes. Raises ProgramError for any other number of sizes."""
    texts = attribute.split(", ") if isinstance(attribute, str) else []
    if len(texts) != count:
        raise ProgramError("dim", f"{attribute!r} is not {count} size(s)")
    return [dim_attribute(text) for text in texts]


def dim_attribute(attribute: Attribute) -> Dim:
    """Parse an attribute that is one size. Raises ProgramError if it is not a size."""
    try:
        return Dim.parse(attribute if isinstance(attribute, str) else "?")
    except ValueError as error:
        raise ProgramError("dim", str(error)) from None
