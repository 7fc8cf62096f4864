"""Define one functional torch.library operator per kernel. On a GPU the operator launches the kernel; on a
CPU the interpreter runs the kernel's program.

``torch.ops.coda_agent.NAME`` takes the kernel's inputs in the spec's order; a scalar is a Python number.
Further arguments are integers: the dims that no input's shape determines. The operator returns the outputs in
the spec's order. The operators of accepted kernels have no autograd. ``fused.chains`` defines further
operators, with autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from coda_agent.fused import launching, programs
from coda_agent.fused.programs import Order, Typed
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import interpret, solve_sizes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import TensorType
from coda_agent.primitives.runtime.launch import NONE

NAMESPACE = "coda_agent"
library = torch.library.Library(NAMESPACE, "DEF")
_defining = threading.Lock()
ROWS = Dim.parse("M")
Run = Callable[[Typed, dict[str, Any]], list[Tensor]]
defined: dict[str, Op] = {}
# Each call of an operator on the meta device calls these functions with the program and its sizes.
watchers: list[Callable[[Program, dict[str, int]], None]] = []


class NoBackward(RuntimeError):
    """A call needs a derivative that a fused operation does not have."""


def check_backward(*gradients: Tensor | None) -> None:
    """Raise NoBackward if PyTorch records the current backward, in order to compute a second derivative, or
    if it computes many gradients at once. ``gradients``: the gradients that the backward gets."""
    if torch.is_grad_enabled():
        raise NoBackward("a fused operation has no second derivative: leave out create_graph=True")
    if not torch.compiler.is_compiling() and any(g is not None and _batched(g) for g in gradients):
        raise NoBackward(
            "a fused operation has no batched backward: leave out is_grads_batched and vectorize"
        )


def _batched(gradient: Tensor) -> bool:
    code = torch._C._functorch
    return code.is_legacy_batchedtensor(gradient) or code.is_batchedtensor(gradient)


def check_device(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if tensors are on several devices. ``name``: the operator's name."""
    places = {str(tensor.device) for tensor in tensors}
    if len(places) > 1:
        found = ", ".join(sorted(places))
        raise ValueError(f"{name}: its tensors are on {found}; move them to one device")


def check_torch_func() -> None:
    """Raise NoBackward if a transform of torch.func is active. Under torch.compile, do nothing."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NoBackward("torch.func cannot differentiate a fused operation: use torch.autograd.grad")


def check_forward_mode(given: Iterable[Any]) -> None:
    """Raise NoBackward if a tensor carries a tangent of forward-mode differentiation. Under torch.compile, do
    nothing."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in given):
        raise NoBackward("a fused operation has no forward-mode derivative: use torch.autograd.grad")


class Op:
    """The operator of a program. ``rows``: process at most this many rows at a time, to limit the size of
    tensors between matmuls. ``overwrites``: on a GPU, outputs that update an input are written into that
    input."""

    def __init__(
        self,
        program: Program,
        order: Order,
        declared: Mapping[str, TensorType],
        rows: int = 0,
        overwrites: bool = False,
    ):
        self.program, (self.order, self.outputs) = program, order
        self.tensors = tuple(n for n in self.order if n in program.signature.inputs and declared[n].shape)
        self.rows, signature = rows, program.signature
        together = {**signature.inputs, **signature.outputs}
        self.by_row = {n for n, t in together.items() if t.shape and t.shape[0] == ROWS}
        self.launch = launching.Launcher(program, self.order, self.outputs, overwrites)
        self._typed: dict[programs.Dtypes, Typed] = {}
        self.dims = signature.named
        said = [f"{'Tensor' if declared[n].shape else 'float'} {n}" for n in order.inputs]
        said += [f"int {dim}" for dim in self.dims]
        made = ", ".join("Tensor" for _ in self.outputs)
        self.schema = f"({', '.join(said)}) -> {made if len(self.outputs) == 1 else f'({made})'}"

    def typed(self, inputs: Mapping[str, Any]) -> Typed:
        """The program for these tensors' dtypes. Each combination of dtypes has one program object. Raises
        TypeError for dtypes that the program cannot take, and ValueError for tensors on several devices."""
        check_device(self.program.signature.name, (inputs[name] for name in self.tensors))
        key = tuple((name, inputs[name].dtype) for name in self.tensors)
        if key not in self._typed:
            self._typed.setdefault(key, programs.typed(self.program, key))
        return self._typed[key]

    def named(self, arguments: Sequence[Any]) -> tuple[dict[str, Any], Mapping[str, int]]:
        """The program's inputs by name, and the dims that the caller gives."""
        given, read = zip((*self.order, *self.dims), arguments, strict=True), self.program.signature.inputs
        inputs = {name: value for name, value in given if name in read}
        if not self.dims:
            return inputs, NONE
        return inputs, dict(zip(self.dims, arguments[len(self.order) :], strict=True))

    def checked(self, inputs: dict[str, Any]) -> tuple[Typed, dict[str, Any]]:
        """The program for the tensors' dtypes, and the inputs. Raises NoBackward if PyTorch records gradients
        and a tensor requires grad. Also raises the errors of ``typed``."""
        if torch.is_grad_enabled():
            for name in self.tensors:
                if inputs[name].requires_grad:
                    raise NoBackward(
                        f"{self.program.signature.name}: {name} requires grad, and this operator has no "
                        "backward: call it under torch.no_grad(), or use the modules of fused"
                    )
        return self.typed(inputs), inputs

    def results(self, found: Sequence[Tensor]) -> Any:
        return tuple(found) if len(self.outputs) > 1 else found[0]

    def run(self, *arguments: Any) -> Any:
        """Compute without PyTorch's dispatcher, on the device of the first argument, which is a tensor."""
        first = arguments[0]
        return (self.on_cuda if first.is_cuda else self.fake if first.is_meta else self.on_cpu)(*arguments)

    def on_cpu(self, *arguments: Any) -> Any:
        inputs, dims = self.named(arguments)
        return self.results(self.in_parts(partial(self.interpreted, dims=dims), *self.checked(inputs)))

    def on_cuda(self, *arguments: Any) -> Any:
        found = self.launch.again(arguments)
        if found is None:
            inputs, dims = self.named(arguments)
            found = self.in_parts(partial(self.launch, dims=dims), *self.checked(inputs))
        return self.results(found)

    def in_parts(self, run: Run, how: Typed, inputs: dict[str, Any]) -> list[Tensor]:
        """Compute the outputs from all rows at once, or from ``rows`` rows at a time. An output with an axis
        of rows is joined from its parts; any other output is a sum over rows, so its parts are added."""
        total = inputs[self.tensors[0]].shape[0] if self.rows else 0
        if total <= self.rows:
            return run(how, inputs)
        parts: list[list[Tensor]] = [[] for _ in self.outputs]
        for first in range(0, total, self.rows):
            own = {n: inputs[n][first : first + self.rows] for n in self.by_row if n in inputs}
            for name, each, made in zip(self.outputs, parts, run(how, inputs | own), strict=True):
                if name in self.by_row or not each:
                    each.append(made)
                else:
                    each[0].add_(made)
        whole = zip(self.outputs, parts, strict=True)
        return [torch.cat(each) if name in self.by_row else each[0] for name, each in whole]

    def interpreted(self, how: Typed, inputs: dict[str, Any], dims: Mapping[str, int]) -> list[Tensor]:
        program, wide = how
        device = inputs[self.tensors[0]].device
        whole = {n: v if isinstance(v, Tensor) else torch.tensor(v, device=device) for n, v in inputs.items()}
        with torch.autocast(device.type, enabled=False):  # autocast would round the accumulators
            made = interpret(program, whole, sizes=dims, wide=torch.float32 if wide else None)
        taken = {t.untyped_storage().data_ptr() for t in whole.values()}
        found = []
        for tensor in (made[n].contiguous() for n in self.outputs):
            # an operator's results must not share storage with its inputs, or with each other
            shared = tensor.untyped_storage().data_ptr() in taken
            found.append(tensor.clone() if shared else tensor)
            taken.add(found[-1].untyped_storage().data_ptr())
        return found

    def fake(self, *arguments: Any) -> Any:
        inputs, dims = self.named(arguments)
        # without this check, a model under torch.compile would silently get gradients of zero
        how, _ = self.checked(inputs)
        first = inputs[self.tensors[0]]
        signature = how.program.signature
        shapes = {n: v.shape if isinstance(v, Tensor) else () for n, v in inputs.items()}
        sizes = solve_sizes(signature, shapes, dims)
        for watch in watchers:
            watch(how.program, sizes | ({"M": min(sizes["M"], self.rows)} if self.rows else {}))
        made = {n: [d.value(sizes) for d in t.shape] for n, t in signature.outputs.items()}
        return self.results(
            [first.new_empty(made[n], dtype=programs.output_dtype(how, n)) for n in self.outputs]
        )


def define(
    program: Program,
    order: Order,
    name: str,
    declared: Mapping[str, TensorType] | None = None,
    rows: int = 0,
) -> Callable[..., Any]:
    """Return the operator ``torch.ops.coda_agent.NAME`` of a program. The first call defines the operator.
    ``declared``: the types of all arguments, if autograd needs more arguments than the program reads.
    ``rows``: process at most this many rows (M) at a time. Raises ValueError if another program has that
    name."""
    declared = declared or program.signature.inputs
    with _defining:
        if name not in defined:
            op = Op(program, order, declared, rows)
            library.define(name + op.schema)
            library.impl(name, op.on_cpu, "CPU")
            library.impl(name, op.on_cuda, "CUDA")
            torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=library)
            defined[name] = op
    if defined[name].program != program:
        raise ValueError(f"another program already defines operator {name}")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


for _name, (_program, _order) in programs.accepted().items():
    define(_program, _order, _name)
