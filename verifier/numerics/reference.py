"""Run a spec's reference: in fp64 for the truth, in fp32 for the yardstick.

The spec's owner wrote the reference, so its code is trusted. The names in the code are checked only to report
the line of a misspelled name. Large cases are computed in blocks of rows, if a trial at tiny sizes shows that
the blocks give the same result.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import saturated
from coda_agent.verifier.numerics.values import DTYPES, Sizes, trial
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import OutputSpec, TensorSpec

BLOCK_BYTES = 1 << 31  # bytes that a block and its temporaries may take
# A matrix may be as large as the product of two extents. If AMPLE matrices of this size fit in a block's
# memory, the shapes of the reference's intermediate tensors are not inspected. This saves 2 s of PyTorch
# imports.
AMPLE = 8
TEMPORARIES = 6  # a guess at how many tensors of a block's size a reference keeps alive at once
TEXT = "<reference>"

Tensors = Mapping[str, Tensor]
Function = Callable[..., dict[str, Tensor]]
Product = Callable[[Tensor, Tensor], Tensor]  # the matmul of two rounded operands, in fp32

_BUILTINS = ("enumerate", "float", "int", "len", "range", "tuple", "zip")
# A reference can raise any exception. Every exception, including a failed assertion and sys.exit, counts as a
# fault of the reference.
MISTAKES = (Exception, SystemExit)


class RowDim(NamedTuple):
    """A dim along which a reference may be computed in blocks. ``whole``: while the reference computes a
    block, it sees the dim's full size, not the block's size."""

    name: str
    whole: bool


def function(spec: Spec, text: str | None = None) -> Function:
    """Compile ``text`` (by default the reference) to a function of inputs, dims and constants, all passed by
    keyword.

    The function returns the outputs by name. It has no casts and no side effects, and ``torch.compile``
    accepts it.
    """
    arguments = (*spec.inputs, *spec.dims, *spec.constants)
    return _compile(text or spec.reference, arguments, tuple(spec.outputs))


@functools.lru_cache(maxsize=256)
def _compile(text: str, arguments: tuple[str, ...], outputs: tuple[str, ...]) -> Function:
    result = ", ".join(f"{name!r}: {name}" for name in outputs)
    shell = ast.parse(f"def reference(*, {', '.join(arguments)}):\n    return {{{result}}}")
    head = shell.body[0]
    if isinstance(head, ast.FunctionDef):
        head.body = [*ast.parse(text).body, *head.body]
    names = dict(scope())
    exec(compile(shell, TEXT, "exec"), names)
    compiled: Function = names["reference"]
    return compiled


@functools.cache
def scope() -> dict[str, Any]:
    """The names that a reference may use: functions of torch and torch.nn.functional, and a few builtins."""
    known: dict[str, Any] = {"torch": torch}
    # a name in both modules means the function of torch.nn.functional, which has the simpler signature
    for module in (torch, torch.nn.functional):
        names = (n for n in dir(module) if not n.startswith("_"))
        known |= {n: f for n in names if callable(f := getattr(module, n))}
    return known | {n: getattr(builtins, n) for n in _BUILTINS}  # the builtin range, not torch.range


def run(spec: Spec, inputs: Tensors, sizes: Sizes, text: str | None = None) -> dict[str, Tensor]:
    """The outputs of the reference (or of another ``text``) by name, not cast to their dtypes."""
    dims = {dim: sizes[dim] for dim in spec.dims}
    tensors = {name: inputs[name] for name in spec.inputs}
    return function(spec, text)(**tensors, **dims, **spec.constants)


def finished(spec: Spec, drawn: Tensors, sizes: Sizes) -> dict[str, Tensor]:
    """Compute all inputs of a spec from its drawn inputs. For a backward, the parts before it (its forward
    and its head, as in ``Spec``) run in fp64, and each tensor that they store is rounded once."""
    known = dict(drawn)
    for part in (spec.before, spec.head):
        if part:
            dtypes = {name: DTYPES[output.dtype] for name, output in part.outputs.items()}
            known |= _evaluate(part, known, sizes, torch.float64, dtypes)
    return {name: known[name] for name in spec.inputs}


def tiny_inputs(spec: Spec) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Tiny sizes, and fp64 inputs at these sizes. The inputs are those of ``values.trial`` and, for a
    backward, the tensors that its forward and head store."""
    sizes, known = trial(spec)
    for part in (spec.before, spec.head):
        known |= run(part, known, sizes) if part else {}
    return sizes, known


def oracle(spec: Spec, inputs: Tensors, sizes: Sizes, text: str | None = None) -> dict[str, Tensor]:
    """The truth: the outputs of the reference (or of another ``text``) in fp64. Large cases are computed in
    blocks of rows."""
    outputs = dict.fromkeys(spec.outputs, torch.float64)
    return _evaluate(spec, inputs, sizes, torch.float64, outputs, text)


def jittered(spec: Spec, inputs: Tensors, sizes: Sizes) -> dict[str, Tensor]:
    """The oracle's outputs with random rounding errors: each operation's result is multiplied by 1 + 2**-52
    or 1 - 2**-52 (Monte Carlo arithmetic). Digits in which these outputs differ from the oracle's are
    unreliable. For example, z - tanh(z) for z below 1e-8 is zero in fp64, but not in these outputs."""
    with _Jitter():
        return oracle(spec, inputs, sizes)


def fp32(
    spec: Spec, inputs: Tensors, sizes: Sizes, text: str | None = None, product: Product | None = None
) -> dict[str, Tensor]:
    """The reference's outputs in fp32. Its matmuls round their operands to the 16-bit dtype of the inputs.

    ``product`` replaces the matmuls, to show how an inaccurate matmul changes the outputs.
    """
    outputs = dict.fromkeys(spec.outputs, torch.float32)
    with _rounded_operands(spec, product):
        return _evaluate(spec, inputs, sizes, torch.float32, outputs, text)


def unrounded(spec: Spec, inputs: Tensors, sizes: Sizes) -> dict[str, Tensor]:
    """The reference's outputs in fp32, without rounding the operands of its matmuls."""
    return _evaluate(spec, inputs, sizes, torch.float32, dict.fromkeys(spec.outputs, torch.float32))


def yardstick(spec: Spec, inputs: Tensors, sizes: Sizes, text: str | None = None) -> dict[str, Tensor]:
    """The outputs of ``fp32``, each rounded once to its dtype. Their error is about as large as the error of
    every correct kernel."""
    outputs = {name: DTYPES[output.dtype] for name, output in spec.outputs.items()}
    with _rounded_operands(spec):
        return _evaluate(spec, inputs, sizes, torch.float32, outputs, text)


def row_dim(spec: Spec) -> RowDim | None:
    """The dim along which the reference may run in blocks, or None.

    Every tensor that has the dim has it as the first axis. The blocks' outputs are concatenated if they have
    the dim, and summed otherwise. A trial at tiny sizes checks that the blocks give the same result.
    """
    tensors: list[TensorSpec | OutputSpec] = [*spec.outputs.values(), *spec.inputs.values()]
    sizes, inputs = tiny_inputs(spec)
    for name in dict.fromkeys(n for t in tensors for n in spec.dims if _leads(t, n)):
        inner = {n for t in tensors for d in (t.shape[1:] if _leads(t, name) else t.shape) for n in d.names}
        if name in inner:
            continue
        for whole in (False, True):
            if _blocks_agree(spec, inputs, sizes, RowDim(name, whole)):
                return RowDim(name, whole)
    return None


def _leads(tensor: TensorSpec | OutputSpec, name: str) -> bool:
    return bool(tensor.shape) and tensor.shape[0] == Dim.parse(name)


def _blocks_agree(spec: Spec, inputs: Tensors, sizes: Sizes, row: RowDim) -> bool:
    dtypes = dict.fromkeys(spec.outputs, torch.float64)
    truth = _whole(spec, inputs, sizes, torch.float64, dtypes)
    try:
        blocked = _in_blocks(spec, inputs, sizes, row, 2, torch.float64, dtypes)
    except MISTAKES:
        return False
    return all(
        blocked[name].shape == value.shape and torch.allclose(blocked[name], value, rtol=1e-9, equal_nan=True)
        for name, value in truth.items()
    )


def _evaluate(
    spec: Spec,
    inputs: Tensors,
    sizes: Sizes,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    text: str | None = None,
) -> dict[str, Tensor]:
    # Inference mode is off, because in it ``linear`` and ``matmul`` would not be decomposed into ``mm`` and
    # ``bmm`` before they reach the dispatch mode.
    with torch.inference_mode(False), torch.no_grad(), _exact_fp32():
        rows = _rows(spec, sizes)
        if rows is None:
            return _whole(spec, inputs, sizes, dtype, dtypes, text)
        return _in_blocks(spec, inputs, sizes, rows[0], rows[1], dtype, dtypes, text)


def _rows(spec: Spec, sizes: Sizes) -> tuple[RowDim, int] | None:
    """The dim to split into blocks, and the number of rows per block. None if everything fits in one block,
    or if no dim can be split."""
    tensors: list[TensorSpec | OutputSpec] = [*spec.inputs.values(), *spec.outputs.values()]
    declared = sum(torch.Size([d(sizes) for d in t.shape]).numel() for t in tensors)
    extents = {d for t in tensors for d in t.shape}
    largest = max((a(sizes) * b(sizes) for a in extents for b in extents if not a.names & b.names), default=0)
    if largest * 8 * TEMPORARIES * AMPLE <= BLOCK_BYTES:
        return None
    made = _tensor_shapes(spec, sizes)
    elements = max([declared, *(shape.numel() for shape in made)])
    if elements * 8 * TEMPORARIES <= BLOCK_BYTES or (row := row_dim(spec)) is None:
        return None
    total = sizes[row.name]
    leading = [t for t in tensors if _leads(t, row.name)]
    declared = sum(torch.Size([d(sizes) for d in t.shape[1:]]).numel() for t in leading)
    per_row = max([declared, *(shape.numel() // total for shape in made if total in shape)])
    fit = BLOCK_BYTES // (8 * TEMPORARIES * per_row)
    return row, max(128, fit // 128 * 128)


def _tensor_shapes(spec: Spec, sizes: Sizes) -> list[torch.Size]:
    """The shapes of all tensors that the reference creates, found without computing values. Intermediate
    tensors (such as logits that are not returned) are included, because they need memory too. The list ends
    where the reference needs values, for example to take a branch."""
    inputs = {
        name: torch.empty([d(sizes) for d in t.shape], dtype=DTYPES[t.dtype], device="meta")
        for name, t in spec.inputs.items()
    }
    recorder = _Recorder()
    with suppress(*MISTAKES), recorder:
        run(spec, {name: cast(t, torch.float32) for name, t in inputs.items()}, sizes)
    return [tensor.shape for tensor in recorder.tensors]


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid the import of torch.compile's tracer, which takes over 2 seconds."""
        return False


class _Recorder(_Mode):
    """Record every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, tuple | list) else [result]
        self.tensors += [value for value in several if isinstance(value, Tensor)]
        return result


def intermediates(spec: Spec, inputs: Tensors, sizes: Sizes) -> list[Tensor]:
    """The floating-point tensors that the reference creates, in their order."""
    recorder = _Recorder()
    with torch.inference_mode(False), torch.no_grad(), recorder:
        run(spec, inputs, sizes)
    return [tensor for tensor in recorder.tensors if tensor.is_floating_point()]


def _whole(
    spec: Spec,
    inputs: Tensors,
    sizes: Sizes,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    text: str | None = None,
) -> dict[str, Tensor]:
    outputs = run(spec, {name: cast(t, dtype) for name, t in inputs.items()}, sizes, text)
    return {
        name: _saturated(spec, name, value).to(dtypes[name], copy=True) for name, value in outputs.items()
    }


def _saturated(spec: Spec, name: str, value: Tensor) -> Tensor:
    """Clamp an fp8 output to its dtype's range, because fp8 outputs must saturate."""
    return saturated(value, spec.outputs[name].dtype)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating-point tensor; return a tensor of integers (indices) unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _in_blocks(
    spec: Spec,
    inputs: Tensors,
    sizes: Sizes,
    row: RowDim,
    rows: int,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    text: str | None = None,
) -> dict[str, Tensor]:
    cut = {name for name, t in spec.inputs.items() if _leads(t, row.name)}
    common = {name: cast(t, dtype) for name, t in inputs.items() if name not in cut}
    offsets = [name for name, t in spec.inputs.items() if t.init.offsets is not None]
    device = next(iter(inputs.values())).device
    result: dict[str, Tensor] = {}
    for name, output in spec.outputs.items():
        # sums over blocks are rounded once, at the end
        kept = dtypes[name] if _leads(output, row.name) else dtype
        result[name] = torch.zeros([d(sizes) for d in output.shape], dtype=kept, device=device)

    def block(start: int, stop: int) -> None:  # a function, to free its temporaries on return
        part = {name: cast(inputs[name][start:stop], dtype) for name in cut}
        part |= {name: (inputs[name] - start).clamp(0, stop - start) for name in offsets}
        seen = dict(sizes) if row.whole else {**sizes, row.name: stop - start}
        for name, value in run(spec, {**common, **part}, seen, text).items():
            if _leads(spec.outputs[name], row.name):
                result[name][start:stop] = _saturated(spec, name, value)
            else:
                result[name] += value

    total = sizes[row.name]
    for start in range(0, total, rows):
        block(start, min(start + rows, total))
    summed = {n: _saturated(spec, n, t) for n, t in result.items() if not _leads(spec.outputs[n], row.name)}
    return {name: value.to(dtypes[name]) for name, value in (result | summed).items()}


class _Jitter(_Mode):
    """Multiply each floating result by 1 + 2**-52 or 1 - 2**-52, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(returned.alias_info for returned in func._schema.returns):
            return made  # do not copy a view, because the reference may write through it
        return tree_map_only(Tensor, self._off, made)

    def _off(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.is_meta:
            return value
        up = torch.rand(value.shape, generator=self.random).to(value.device) < 0.5
        return value * (1 + 2.0**-52 * (2 * up.to(value.dtype) - 1))


@contextmanager
def _exact_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _rounded_operands(spec: Spec, product: Product | None = None) -> AbstractContextManager[object]:
    """Round matmul operands to the inputs' 16-bit dtype in the ``with`` block. If some inputs are
    bf16 and others fp16, round to bf16, the coarser dtype. If some are fp8 and none has 16 bits, round to
    bf16, which can represent every fp8 value."""
    present = {t.dtype for t in spec.inputs.values()}
    holders = {"bf16": "bf16", "fp16": "fp16", "fp8_e4m3": "bf16"}
    narrow = next((DTYPES[held] for d, held in holders.items() if d in present), None)
    if not narrow and not product:
        return nullcontext()
    return _RoundedOperands(narrow or torch.float32, "fp8_e4m3" in present, product)


_aten = torch.ops.aten
# For each matmul operation: the position of its first operand (the second follows it), and the plain matmul.
_PRODUCTS: dict[Any, tuple[int, Callable[..., Tensor]]] = {
    _aten.mm.default: (0, torch.mm),
    _aten.bmm.default: (0, torch.bmm),
    _aten.mv.default: (0, torch.mv),
    _aten.dot.default: (0, torch.dot),
    _aten.addmm.default: (1, torch.mm),
    _aten.baddbmm.default: (1, torch.bmm),
    _aten.addmv.default: (1, torch.mv),
}


class _RoundedOperands(_Mode):
    def __init__(self, dtype: torch.dtype, fp8: bool, product: Product | None):
        super().__init__()
        self.dtype, self.fp8, self.product = dtype, fp8, product

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        at, multiply = _PRODUCTS[func]
        product = self._product(multiply, args[at], args[at + 1])
        if at:
            return kwargs.get("beta", 1) * args[0] + kwargs.get("alpha", 1) * product
        return product

    def _product(self, multiply: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
        if self.product:
            return self.product(a.to(self.dtype), b.to(self.dtype))
        if self.fp8 and a.is_cuda and multiply is torch.mm:
            eights = [t.to(torch.float8_e4m3fn) for t in (a, b)]
            if all(torch.equal(h.to(t.dtype), t) for h, t in zip(eights, (a, b), strict=True)):
                # For fp8 operands, tensor cores keep fewer bits of a sum, even if a kernel adds partial sums
                # in fp32. So the yardstick uses tensor cores too.
                one = torch.ones((), device=a.device)
                columns = b.shape[1]  # padded below, because _scaled_mm needs a multiple of 16
                right = torch.nn.functional.pad(b.mT, (0, 0, 0, -columns % 16)).to(eights[1].dtype)
                left = eights[0].contiguous()
                wide = torch._scaled_mm(left, right.contiguous().mT, one, one, out_dtype=torch.float32)
                return wide[:, :columns]
        a, b = a.to(self.dtype), b.to(self.dtype)
        if a.is_cuda and multiply in (torch.mm, torch.bmm):
            # Tensor cores truncate when they accumulate in fp32. On an H100 a row's sum of squares then has
            # 20 times the error of fp32 multiply-adds. No kernel on tensor cores could be as accurate as
            # multiply-adds, so the yardstick uses tensor cores too.
            return multiply(a, b, out_dtype=torch.float32)
        return multiply(a.float(), b.float())
