"""One functional operator of torch.library a kernel: CUDA by the launcher, a CPU by the interpreter.

``torch.ops.coda_agent.NAME`` takes a kernel's inputs in its spec's order, with numbers for its scalars, and
returns its outputs in the spec's order. No operator has autograd of its own: ``fused.chains`` has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coda_agent.fused import launching, programs
from coda_agent.fused.programs import Order, Typed
from coda_agent.primitives.lang.interpret import interpret, solve_sizes
from coda_agent.primitives.lang.ir import Program

NAMESPACE = "coda_agent"
_library = torch.library.Library(NAMESPACE, "DEF")
_defining = threading.Lock()
defined: dict[str, Program] = {}


class NoBackward(RuntimeError):
    """An operator was called on a tensor that requires grad while PyTorch records gradients."""


class _Op:
    def __init__(self, program: Program, order: Order):
        self.program, (self.order, self.outputs) = program, order
        given = program.signature.inputs
        self.tensors = tuple(n for n in self.order if given[n].shape)
        self._typed: dict[programs.Dtypes, Typed] = {}
        said = (f"{'Tensor' if given[n].shape else 'float'} {n}" for n in order.inputs)
        made = ", ".join("Tensor" for _ in self.outputs)
        self.schema = f"({', '.join(said)}) -> {made if len(self.outputs) == 1 else f'({made})'}"

    def typed(self, inputs: Mapping[str, Any]) -> Typed:
        """The program at these tensors' dtypes; one object for the same ones. TypeError."""
        key = programs.dtypes(self.tensors, inputs)
        if key not in self._typed:
            self._typed.setdefault(key, programs.typed(self.program, key))
        return self._typed[key]

    def given(self, arguments: Sequence[Any]) -> tuple[Typed, dict[str, Any]]:
        """The program at the tensors' dtypes, and inputs by name. TypeError, NoBackward."""
        inputs = dict(zip(self.order, arguments, strict=True))
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

    def on_cpu(self, *arguments: Any) -> Any:
        (program, wide), inputs = self.given(arguments)
        device = inputs[self.tensors[0]].device
        whole = {n: v if isinstance(v, Tensor) else torch.tensor(v, device=device) for n, v in inputs.items()}
        made = interpret(program, whole, wide=wide)
        taken = {t.untyped_storage().data_ptr() for t in whole.values()}
        found = []
        for tensor in (made[n].contiguous() for n in self.outputs):
            shared = tensor.untyped_storage().data_ptr() in taken  # an operator's results are its own
            found.append(tensor.clone() if shared else tensor)
            taken.add(found[-1].untyped_storage().data_ptr())
        return self.results(found)

    def on_cuda(self, *arguments: Any) -> Any:
        how, inputs = self.given(arguments)
        return self.results(launching.launch(how, inputs, self.tensors, self.outputs))

    def fake(self, *arguments: Any) -> Any:
        inputs = dict(zip(self.order, arguments, strict=True))
        how, first = self.typed(inputs), inputs[self.tensors[0]]
        signature = how.program.signature
        sizes = solve_sizes(
            signature, {n: v.shape if isinstance(v, Tensor) else () for n, v in inputs.items()}
        )
        shapes = {n: [d.value(sizes) for d in t.shape] for n, t in signature.outputs.items()}
        return self.results(
            [first.new_empty(shapes[n], dtype=programs.output_dtype(how, n)) for n in self.outputs]
        )


def define(program: Program, order: Order, name: str = "") -> Callable[..., Any]:
    """The operator of a program, which is made once: ``torch.ops.coda_agent.NAME``. ValueError where another
    program has that name."""
    name = name or program.signature.name
    with _defining:
        if name not in defined:
            op = _Op(program, programs.arranged(program, order))
            _library.define(name + op.schema)
            _library.impl(name, op.on_cpu, "CPU")
            _library.impl(name, op.on_cuda, "CUDA")
            torch.library.register_fake(f"{NAMESPACE}::{name}", op.fake, lib=_library)
            defined[name] = program
    if defined[name] != program:
        raise ValueError(f"operator {name} is another program's")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


for _name, (_program, _order) in programs.accepted().items():
    define(_program, _order, _name)
