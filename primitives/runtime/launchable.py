"""Checks of tensors and sizes before any kernel runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from coda_agent.primitives.compiler.roofline import ITEM_BYTES
from coda_agent.primitives.lang.assign_steps import rows_by_expert
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import solve_sizes, torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.ops.tiles import check_index
from coda_agent.primitives.lang.ops.tiles import check_offsets as rising
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.signature import Signature

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # in bytes; for bulk copies, addresses and row strides must be multiples of this


class LaunchError(Exception):
    """A program cannot run on these tensors or sizes. Raised before any kernel runs."""


def alignment_errors(program: Program, sizes: Mapping[str, int]) -> list[str]:
    """One message for each tensor whose row size, at these sizes, is not a multiple of 16 bytes."""
    signature, types = program.signature, program.types()
    tensors = {name: (t.shape, t.dtype) for name, t in {**signature.inputs, **signature.outputs}.items()}
    for index, dtype in cut(program).dtypes.items():
        if types[index].kind == "tile" and index not in program.outputs.values():
            tensors[f"the tile that node {index} passes to the next step"] = (types[index].shape, dtype)
    for name, index in program.outputs.items():
        if types[index].kind == "head":  # needs no alignment, because it is stored element by element
            del tensors[name]
    errors = []
    for name, (shape, dtype) in tensors.items():
        if len(shape) >= 2:
            extent = shape[-1](sizes)
            if extent * ITEM_BYTES[dtype] % ALIGNMENT:
                errors.append(f"{name}: rows of {extent} {dtype} are not a multiple of {ALIGNMENT} bytes")
    return errors


def check_sizes(program: Program, sizes: Mapping[str, int]) -> None:
    """Raise LaunchError for sizes at which a tensor is empty or its rows are misaligned."""
    errors = [*empty(program.signature, sizes), *alignment_errors(program, sizes)]
    if errors:
        raise LaunchError("; ".join(errors))


def check_tensors(
    signature: Signature, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """The size of each dim, from the tensors' shapes and the ``given`` dims. Raises LaunchError if the
    tensors do not match the signature.

    While PyTorch records gradients, no tensor may require grad. A kernel has no autograd, so a loss on its
    outputs would silently give its inputs no gradients.
    """
    import torch

    if set(inputs) != set(signature.inputs):
        raise LaunchError(f"inputs must be {', '.join(signature.inputs)}; got {', '.join(inputs)}")
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(f"input {name!r} must be a tensor; it is of type {type(tensor).__name__}")
    devices = {str(t.device) for t in inputs.values()}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        raise LaunchError(f"inputs must be on one CUDA device; they are on {', '.join(sorted(devices))}")
    for name, tensor in inputs.items():
        declared = signature.inputs[name]
        if tensor.dtype != torch_dtype(declared.dtype):
            raise LaunchError(f"input {name!r} is {tensor.dtype}; the spec says {declared.dtype}")
        if tensor.ndim != len(declared.shape):
            raise LaunchError(f"input {name!r} has {tensor.ndim} dims; the spec says {len(declared.shape)}")
        if not tensor.is_contiguous() or tensor.ndim and tensor.data_ptr() % ALIGNMENT:
            raise LaunchError(
                f"input {name!r} must be contiguous and {ALIGNMENT}-byte aligned: call .contiguous()"
            )
        if dense(tensor) is not tensor:
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise LaunchError(
                f"input {name!r} of shape {shape} has strides {strides}, which bulk copies cannot use: call "
                f".flatten().view{shape}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise LaunchError(
                f"input {name!r} requires grad, but a kernel has no autograd: call .detach(), or launch "
                "under torch.no_grad()"
            )
    check_updates(signature, inputs)
    try:
        return solve_sizes(signature, {k: tuple(t.shape) for k, t in inputs.items()}, given)
    except ValueError as error:
        raise LaunchError(str(error)) from None


def sorted_rows(program: Program) -> Iterator[tuple[str, Dim]]:
    """Each input that holds offsets of experts' rows, and the number of rows that these offsets divide among
    experts."""
    types = program.types()
    for gemm, node in enumerate(program.nodes):
        if node.offsets is not None:
            rows = types[rows_by_expert(program, gemm)].shape[0]
            yield str(program.nodes[node.offsets].attribute), rows


def gathered_rows(program: Program) -> Iterator[tuple[str, Dim]]:
    """Each input that holds indices of rows, and the number of rows that an index can choose from."""
    types = program.types()
    for node in program.nodes:
        if node.row_index is not None:
            yield str(program.nodes[node.row_index].attribute), types[node.args[0]].shape[0]


def check_offsets(
    program: Program, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Raise LaunchError if offsets do not rise from 0 to the number of rows, or if a row index is out of
    range. Reading offsets and indices waits for the GPU. A kernel clamps offsets and indices instead of
    checking them, so that it accesses no memory outside its tensors."""
    checks = [(name, rows, lambda t, n: rising(t.tolist(), n)) for name, rows in sorted_rows(program)]
    checks += [(name, rows, check_index) for name, rows in gathered_rows(program)]
    for name, rows, check in checks:
        sizes = solve_sizes(program.signature, {k: tuple(t.shape) for k, t in inputs.items()}, given)
        try:
            check(inputs[name], rows(sizes))
        except ValueError as error:
            raise LaunchError(f"input {name!r}: {error}") from None


def check_updates(signature: Signature, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise LaunchError if an input that the kernel overwrites shares memory with another input. No other
    check is needed here, because tracing already checked that the kernel reads each element only where it
    overwrites the element."""
    spans = {n: (t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for n, t in inputs.items()}
    for output, written in signature.updates.items():
        start, end = spans[written]
        for other, (first, last) in spans.items():
            if other != written and first < end and start < last:
                raise LaunchError(
                    f"output {output!r} overwrites input {written!r}, which shares memory with input "
                    f"{other!r}: give {other!r} a tensor of its own, with .clone()"
                )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor with the strides of a fresh tensor. PyTorch ignores the stride of an axis
    of size 1, but bulk copies need a stride that is a multiple of 16 bytes. A tensor that already has the
    strides of a fresh tensor, or is not contiguous, is returned unchanged."""
    if 1 not in tensor.shape or not tensor.is_contiguous():
        return tensor
    strides = tuple(prod(max(1, n) for n in tensor.shape[axis + 1 :]) for axis in range(tensor.ndim))
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def empty(signature: Signature, sizes: Mapping[str, int]) -> list[str]:
    """One message per input or output that has no elements at these sizes. An extent can be 0 because it may
    be a difference of sizes."""
    errors = []
    for name, tensor in {**signature.inputs, **signature.outputs}.items():
        extents = [d(sizes) for d in tensor.shape]
        if min(extents, default=1) < 1:
            errors.append(f"{name} would be {extents} at {dict(sizes)}: every extent is at least 1")
    return errors
