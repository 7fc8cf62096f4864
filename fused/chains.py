"""Turn chains of operations into differentiable operators, each with a program as its forward and with a
derived backward.

A chain is a sequence of operations with matmuls, for example a norm and an MLP. Each chain becomes one
operator of torch.library with autograd. The operator's forward is a program that begins with the chain's
first matmul. If the chain has a norm before this matmul, PyTorch computes the norm (``begun``). Autograd does
not record this norm, because the operator itself returns the gradients of the norm's input and weight.
``primitives.derive`` derives a backward for the inputs that require gradients. This backward has a pointwise
part, which PyTorch computes, and a program of matmuls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coda_agent.fused import ops
from coda_agent.fused.pointwise.programs import PointwiseProgram, fused_on_gpu
from coda_agent.fused.programs import Order
from coda_agent.primitives.derive import Derived, all_sizes, derive
from coda_agent.primitives.derive.arrange import BackwardPlan, BackwardRequest, PlannedBackward
from coda_agent.primitives.derive.chains import Chain
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.signature import DTYPES
from coda_agent.primitives.lang.trace import Trace

# Sizes of a 7B model. Among several forms of a backward, ``derive`` chooses the form that moves the fewest
# bytes at these sizes.
SIZES = {"M": 16384, "D": 4096, "F": 11008, "A": 4096, "N": 6144, "H": 48, "P": 64, "V": 32000}
PLAIN = {Tensor, torch.nn.Parameter, float}
NORMED = "hg"  # the first operand of a chain's first matmul: the stream times the norm's weight
THROUGH = "through"  # an extra output of a chain: the unchanged input stream, for later uses


class Begun(NamedTuple):
    """A norm of a stream [M, D] without its row scaling, which the next matmul's epilogue applies. ``hg``:
    the stream times the norm's weight. ``rstd``: the reciprocal RMS [M] in fp32. Autograd records neither
    tensor."""

    hg: Tensor
    rstd: Tensor


def begun(x: Tensor, gamma: Tensor, eps: float, dtype: torch.dtype) -> Begun:
    """Compute in PyTorch a norm of a stream [M, D] without the norm's row scaling. ``hg`` has ``dtype``."""
    with torch.no_grad():
        return Begun(*_begun(x, gamma, eps, dtype))


@fused_on_gpu
def _begun(x: Tensor, gamma: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = x.float()
    return (wide * gamma.float()).to(dtype), torch.rsqrt(wide.square().mean(-1) + eps)


class Remade(NamedTuple):
    """How to compute a reordered weight: the function, and the function's arguments, which are weights of a
    checkpoint."""

    make: Callable[..., Tensor]
    of: tuple[Tensor, ...]


def remade(make: Callable[..., Tensor], *of: Tensor) -> Tensor:
    """Compute ``make(*of)``. Autograd stores only ``of``, and the backward computes the result again.

    To store the result instead would double the memory of a model's weights. Under FSDP, which shards weights
    between forward and backward, the stored result would keep complete weights in memory. Under
    torch.compile, the compiler's partitioner decides what is computed again.
    """
    made = make(*of)
    if not torch.compiler.is_compiling():
        made._coda_agent_remade = Remade(make, of)  # type: ignore[attr-defined]
    return made


class _Stored(NamedTuple):
    """The inputs and outputs of an operator that its backward uses. ``wrt``: the inputs whose gradients the
    backward computes. ``scalars`` and ``tensors``: the values that the backward reads. Each of the two maps a
    value's name to the value's position among the operator's inputs and outputs."""

    wrt: tuple[str, ...]
    scalars: dict[str, int]
    tensors: dict[str, int]


ByHand = Callable[[Mapping[str, Any], Mapping[str, int]], tuple[Tensor, Tensor] | None]


class Link:
    """The operators of one chain: for training, for inference, and for each backward.

    ``results``: the outputs that the caller gets with gradients. ``rows``: the most rows that the backward
    processes at a time, to keep the tensors between its matmuls small. ``beside``: further outputs that the
    caller gets, without gradients. ``plain``: a link without ``beside`` for the same chain; if given, this
    link uses the backward of ``plain``. ``stream``: the input that ``apart`` also returns.

    ``by_hand``: hand-written functions for the backward's pointwise part, keyed by the inputs whose gradients
    are computed. Such a function takes the values that the backward reads, and all sizes. The function
    returns a matrix and a vector, or None if it does not apply."""

    def __init__(
        self,
        name: str,
        chain: Chain,
        results: tuple[str, ...],
        rows: int = 0,
        beside: tuple[str, ...] = (),
        plain: Link | None = None,
        by_hand: Mapping[tuple[str, ...], ByHand] = MappingProxyType({}),
        stream: str = "",
    ):
        self.name, self.results, self.rows = name, results, rows
        self.returned, self.plain, self.by_hand = results + beside, plain, by_hand
        self.whole, self.stream = chain.program(name), stream
        self.through = chain.through(stream).program(name) if stream else self.whole
        forward = _forward(self.whole, tuple(self.whole.outputs))
        declared = self.whole.signature.inputs | forward.signature.inputs
        self.inputs = tuple(declared)
        self.floats = {n for n, t in self.whole.signature.inputs.items() if t.dtype in DTYPES and t.shape}
        self.outputs = (*self.returned, *(n for n in forward.signature.outputs if n not in self.returned))
        self.op = ops.define(forward, Order(self.inputs, self.outputs), name, declared)
        self.inference = ops.define(
            _forward(self.whole, self.returned),
            Order(self.inputs, self.returned),
            f"{name}_inference",
            declared,
        )
        self._tensors = {n: self.inputs.index(n) for n, t in self.whole.signature.inputs.items() if t.shape}
        self._backwards: dict[tuple[str, ...], Derived] = {}
        self._stored: dict[tuple[tuple[bool, ...], bool], _Stored] = {}
        self._heads: dict[tuple[tuple[str, ...], torch.dtype], PointwiseProgram] = {}
        self._deriving = threading.Lock()
        torch.library.register_autograd(
            f"{ops.NAMESPACE}::{name}", self._backward, setup_context=self._setup, lib=ops.library
        )
        functions = {
            "forward": staticmethod(self._forward),
            "backward": staticmethod(self._recorded_backward),
        }
        function: Any = type(name, (torch.autograd.Function,), functions)
        # the C++ ``apply``, without its Python wrapper, which only serves torch.func and setup_context
        self._record = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def __call__(self, **inputs: Any) -> tuple[Tensor, ...]:
        """Return the chain's ``results``, then the outputs ``beside``. Among the inputs are the two tensors
        from ``begun``: ``hg``, and ``rstd`` under the chain's own name for it. Raises NoBackward under
        torch.func."""
        given = [inputs[n] for n in self.inputs]
        ops.check_forward_mode(given)
        wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)
        if wanted:
            ops.check_torch_func()
            # recording directly takes less host time than the operator's own autograd
            found = self._record(*given, None) if _plain(given) else self.op(*given)
        else:
            found = self.inference(*given)
        found = found if isinstance(found, tuple) else (found,)
        beside = found[len(self.results) : len(self.returned)]
        return (*found[: len(self.results)], *(t.detach() for t in beside))

    def apart(self, sizes: Sequence[int], **inputs: Any) -> tuple[Sequence[Tensor], Tensor]:
        """Return the chain's result, split into parts of ``sizes`` columns, and the stream for later uses.

        If only autograd records the call, the backward saves work. A hand-written function takes the parts'
        gradients without joining them. The backward's program itself adds the gradient of the stream's later
        uses."""
        given, stream = [inputs[n] for n in self.inputs], inputs[self.stream]
        ops.check_forward_mode(given)
        if torch.is_grad_enabled() and stream.requires_grad and _plain(given):
            ops.check_torch_func()
            *parts, stream = self._record(*given, sizes)
            return parts, stream
        (whole,) = self(**inputs)
        return whole.split(sizes, 1), stream

    def derived(self, wrt: tuple[str, ...]) -> Derived:
        """The backward that computes the gradients of the inputs ``wrt``, derived at the first request. If
        ``wrt`` contains "through", the backward also adds the gradient of the stream's later uses. The
        backward's program of matmuls becomes an operator, named ``NAME_backward_`` plus the inputs' names."""
        if self.plain:
            return self.plain.derived(wrt)
        with self._deriving:
            if wrt not in self._backwards:
                whole, of = (self.through, (THROUGH,)) if THROUGH in wrt else (self.whole, ())
                inputs = [n for n in wrt if n != THROUGH]
                found = derive(whole, SIZES, wrt=inputs, of=(*self.results, *of))
                if found.program:
                    signature = found.program.signature
                    order = Order(tuple(signature.inputs), tuple(signature.outputs))
                    ops.define(self._summed(found.program), order, self.backward_name(wrt), rows=self.rows)
                self._backwards[wrt] = found
            return self._backwards[wrt]

    def _summed(self, program: Program) -> Program:
        """Return the program. If rows are processed in parts, make the program's sums over rows fp32."""
        signature = program.signature
        outputs = {
            n: t if not self.rows or t.shape[0] == ops.ROWS else t._replace(dtype="fp32")
            for n, t in signature.outputs.items()
        }
        return program._replace(signature=signature._replace(outputs=outputs))

    def backward_name(self, wrt: tuple[str, ...]) -> str:
        return "_".join((self.plain.name if self.plain else self.name, "backward", *wrt))

    def _forward(self, ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, sizes = arguments
        made = ops.defined[self.name].run(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        if sizes is None:
            self._setup(ctx, inputs, made)
            return made[: len(self.returned)]
        apart = (*made[0].split(sizes, 1), inputs[self.inputs.index(self.stream)])
        self._setup(ctx, inputs, made, apart)
        return apart

    def _setup(self, ctx: Any, inputs: Sequence[Any], output: Any, apart: tuple[Tensor, ...] = ()) -> None:
        values = (*inputs, *output) if isinstance(output, tuple) else (*inputs, output)
        ctx.apart, key = bool(apart), (ctx.needs_input_grad, bool(apart))
        ctx.stored = stored = self._stored.get(key) or self._new_stored(*key)
        ctx.scalars = [values[i] for i in stored.scalars.values()]
        ctx.shapes = [values[i].shape for i in self._tensors.values()]
        results = apart or values[len(inputs) :][: len(self.results)]
        ctx.like = [(t.dtype, t.device, t.shape) for t in results]
        saved, ctx.again = list[Tensor](), []
        for i in stored.tensors.values():
            again = getattr(values[i], "_coda_agent_remade", None)
            saved += again.of if again else (values[i],)
            ctx.again.append(again and (again.make, len(again.of)))
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)

    def _new_stored(self, needed: tuple[bool, ...], through: bool) -> _Stored:
        wanted = zip(self.inputs, needed, strict=False)  # ``needed`` may be longer than the inputs
        wrt = (*(n for n, each in wanted if each and n in self.floats), *[THROUGH] * through)
        read = self.derived(wrt).stored if wrt else ()
        declared = self.whole.signature.inputs
        place = {n: i for i, n in enumerate(self.inputs + self.outputs) if n in read}
        scalars = {n: i for n, i in place.items() if n in declared and not declared[n].shape}
        tensors = {n: i for n, i in place.items() if n not in scalars}
        self._stored[needed, through] = _Stored(wrt, scalars, tensors)
        return self._stored[needed, through]

    def _backward(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ops.check_backward(*gradients)
        wrt, scalars, tensors = ctx.stored
        coming, found = gradients[: len(ctx.like)], dict[str, Any]()
        if wrt and any(each is not None for each in coming):
            saved = iter(ctx.saved_tensors)
            read = [again[0](*islice(saved, again[1])) if again else next(saved) for again in ctx.again]
            known = dict(zip((*scalars, *tensors), (*ctx.scalars, *read), strict=True))
            whole: list[Any] = [_whole(t, *like) for t, like in zip(coming, ctx.like, strict=True)]
            if ctx.apart:
                *parts, known[f"d_{THROUGH}"] = whole
                whole = [parts if self.by_hand and len(parts) > 1 else _joined(parts)]
            known |= {f"d_{name}": each for name, each in zip(self.results, whole, strict=True)}
            shapes: dict[str, Any] = dict.fromkeys(self.whole.signature.inputs, ())
            shapes |= zip(self._tensors, ctx.shapes, strict=True)
            found = self._run(wrt, known, shapes)
        made = {n: found.get(f"d_{n}") for n in wrt}
        return tuple(made.get(n) for n in self.inputs)

    def _recorded_backward(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *self._backward(ctx, *gradients), None

    def _head(self, wrt: tuple[str, ...], head: Program, dtype: torch.dtype) -> PointwiseProgram:
        """The pointwise part of the backward for these inputs, prepared at the first request."""
        with self._deriving:
            if (wrt, dtype) not in self._heads:
                self._heads[wrt, dtype] = PointwiseProgram(head, dtype)
            return self._heads[wrt, dtype]

    def _pointwise(
        self, wrt: tuple[str, ...], head: Program, known: dict[str, Any], sizes: dict[str, int]
    ) -> dict[str, Tensor]:
        """The outputs of the backward's pointwise part."""
        by_hand = self.by_hand.get(tuple(n for n in wrt if n != THROUGH))
        if by_hand and (found := by_hand(known, sizes)):
            types = head.types()
            return {n: found[types[i].kind != "tile"] for n, i in head.outputs.items()}
        name = f"d_{self.results[0]}"
        known[name] = _joined(known[name])
        return self._head(wrt, head, known[name].dtype)(known, sizes)

    def _run(self, wrt: tuple[str, ...], known: dict[str, Any], shapes: dict[str, Any]) -> dict[str, Any]:
        """Run the backward: its pointwise part, then its program of matmuls. Return all gradients by name."""
        derived = self.derived(wrt)
        if derived.head:
            sizes = all_sizes(derived, solve_sizes(self.whole.signature, shapes))
            known |= self._pointwise(wrt, derived.head, known, sizes)
        if derived.program:
            signature = derived.program.signature
            op = getattr(getattr(torch.ops, ops.NAMESPACE), self.backward_name(wrt)).default
            made = op(*(known[n] for n in signature.inputs))
            known |= zip(signature.outputs, made if isinstance(made, tuple) else (made,), strict=True)
        return known | {name: known[other] for name, other in derived.same.items()}


def _plain(given: Sequence[Any]) -> bool:
    """Whether a call with these arguments can skip PyTorch's dispatcher, because nothing traces or intercepts
    the call."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    return PLAIN.issuperset(map(type, given))


def _whole(gradient: Tensor | None, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """The incoming gradient of one of the chain's results; zeros if no loss uses this result."""
    return torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient.contiguous()


def _joined(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Join the parts into one matrix, side by side. A single tensor is returned as it is."""
    if isinstance(parts, Tensor):
        return parts
    return parts[0] if len(parts) == 1 else torch.cat([*parts], 1)


def _forward(whole: Program, outputs: tuple[str, ...]) -> Program:
    """The program of a chain from its first matmul on. Values that the norm before this matmul computes
    become inputs. If such a value is also an output of the chain, the input has that output's name."""
    trace: Any = Trace(whole.signature)
    for node in whole.nodes:
        trace.add(node)
    arranging = PlannedBackward(BackwardRequest(whole, (), ()), BackwardPlan(frozenset()))
    late = arranging.late(trace)
    wanted = {n: whole.outputs[n] for n in outputs if late[whole.outputs[n]]}
    named = {i: n for n, i in whole.outputs.items()}
    roots = {i: named.get(i, NORMED) for i in arranging.operands(trace, wanted, late)}
    roots |= {i: named[i] for i in arranging.sums(trace, wanted, late)}
    made = arranging.products(trace, wanted, roots, late)
    assert made is not None  # a chain contains matmuls
    return made
