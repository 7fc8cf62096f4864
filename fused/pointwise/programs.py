"""Run programs that have no matmul as PyTorch code. On a GPU, torch.compile fuses the operations. Without
fusion, each operation would be a pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import OPERATIONS, Node, Program, sizes_named
from coda_agent.primitives.lang.signature import DTYPES

Values = Sequence[Any]
Step = Callable[[Values, Values, Values], Any]  # computes a node's value from earlier nodes, inputs and dims


def fused_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that calls on a GPU run it under torch.compile. On a CPU, and while PyTorch traces a
    call, the function runs as it is. The function's first argument must be a tensor, or a sequence that
    starts with a tensor."""
    # torch.compile limits compilations per code object, so each function gets its own code object.
    own = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )

    @cache  # compiled at the first call, because Dynamo and Inductor take longer to import than PyTorch
    def compiled() -> Callable[..., Any]:
        return torch.compile(own)

    def run(first: Any, *more: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0]
        return (compiled() if runs_on_gpu(tensor) else function)(first, *more)

    return run


def runs_on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU, and nothing traces it."""
    traced = torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)
    return tensor.is_cuda and not traced


class PointwiseProgram:
    """A program without a matmul, as a function. It computes in fp32. Results that are matrices are rounded
    once, to ``dtype``; results that are vectors stay fp32."""

    def __init__(self, program: Program, dtype: torch.dtype):
        self._program, self._types, self._dims = program, program.types(), list[Dim]()
        self._names = tuple(program.signature.inputs)
        kinds = {name: self._types[i].kind for name, i in program.outputs.items()}
        made = [(i, dtype if kinds[n] == "tile" else torch_dtype("fp32")) for n, i in program.outputs.items()]
        steps = [self._step(index, node) for index, node in enumerate(program.nodes)]

        def run(inputs: Values, dims: Values) -> list[Tensor]:
            values: list[Any] = []
            for step in steps:
                values.append(step(values, inputs, dims))
            return [values[index].to(kind) for index, kind in made]

        self.run, self._fused = run, fused_on_gpu(run)

    def __call__(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Compute the outputs; return them by name."""
        found = self._fused(*self.arguments(inputs, sizes))
        return dict(zip(self._program.outputs, found, strict=True))

    def arguments(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Values, Values]:
        """The arguments of ``run``."""
        return [inputs[name] for name in self._names], [dim.value(sizes) for dim in self._dims]

    def _dim(self, dim: Dim) -> int:
        """Add a dim to the arguments; return the position of the dim's value among them."""
        self._dims.append(dim)
        return len(self._dims) - 1

    def _step(self, index: int, node: Node) -> Step:
        attribute: Any = node.attribute
        if node.op == "constant":
            return lambda values, inputs, dims: attribute
        if node.op == "dim":
            place = self._dim(Dim.parse(str(attribute)))
            return lambda values, inputs, dims: dims[place]
        if node.op == "input":
            place = self._names.index(str(attribute))
            declared = self._program.signature.inputs[str(attribute)]
            if declared.shape and declared.dtype in DTYPES:
                return lambda values, inputs, dims: inputs[place].float()
            return lambda values, inputs, dims: inputs[place]
        function = OPERATIONS[node.op].torch
        assert function is not None  # there are no matmuls here
        given = [self._met(argument, index) for argument in node.args]
        named = [self._dim(Dim.parse(size)) for size in sizes_named(node)]
        return lambda values, inputs, dims: function(
            torch, *[met(values, inputs, dims) for met in given], *[dims[each] for each in named]
        )

    def _met(self, argument: int, reader: int) -> Step:
        """Return a function that gives the value ``argument`` in the shape that the node ``reader`` needs.
        If the reader computes a tile, two kinds of vectors are expanded. A vector with one value per head is
        spread over each head's columns. A vector as wide as one head is repeated for all heads."""
        kind: Any = self._types[argument]
        if self._types[reader].kind != "tile" or kind.kind not in ("spread", "repeated"):
            return lambda values, inputs, dims: values[argument]
        width = self._dim(kind.period)
        if kind.kind == "spread":
            return lambda values, inputs, dims: values[argument].repeat_interleave(dims[width], dim=1)
        columns = self._dim(self._types[reader].shape[1])
        return lambda values, inputs, dims: values[argument].repeat(1, dims[columns] // dims[width])
