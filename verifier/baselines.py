"""What a kernel has to beat: the plain PyTorch formulation of its spec, compiled and eager, and cuBLAS.

A builder takes (spec, inputs, sizes) and gives a call without arguments that launches the work on the
current stream; ``BASELINES`` names them. QuACK's own kernels have a schedule to sweep and live in
``verifier.quack_baseline``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from verifier.spec import Spec
from verifier.timing import Arm

if TYPE_CHECKING:
    from torch import Tensor

# torch.compile's "max-autotune" replays CUDA graphs, which copy every input into the graph's own
# memory first: a cost that no user pays who keeps inputs in place. Launches are not timed anyway.
MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}

Builder = Callable[[Spec, "Mapping[str, Tensor]", Mapping[str, int]], Callable[[], object]]


def compiled(
    spec: Spec,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    mode: str = "default",
    *,
    backend: str = "inductor",
) -> Callable[[], dict[str, Tensor]]:
    """``torch.compile`` of ``formulation``, fullgraph and static shapes; compiles on the first call.

    ``mode`` is "default" or "max-autotune" (without CUDA graphs).
    """
    import torch
    import torch._inductor.config

    # Its report of every choice would drown ours; refused configurations are part of its search.
    torch._inductor.config.autotune_num_choices_displayed = 0
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    if mode not in MODES:
        raise ValueError(f"torch.compile mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    step = torch.compile(
        formulation(spec, sizes), fullgraph=True, dynamic=False, backend=backend, mode=MODES[mode]
    )
    return _bind(step, spec, inputs)


def eager(
    spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> Callable[[], dict[str, Tensor]]:
    """``formulation`` as PyTorch runs it without a compiler."""
    return _bind(formulation(spec, sizes), spec, inputs)


def matmul(spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Callable[[], list[Tensor]]:
    """cuBLAS's bare matmuls of the formulation: ``torch.mm`` on the very operands (values, layouts),
    into outputs allocated beforehand. Runs the formulation once to collect them.

    Raises ValueError for a formulation without a matmul.
    """
    operands = _operands(eager(spec, inputs, sizes))
    if not operands:
        raise ValueError(f"spec {spec.name}: its formulation has no matmul to compare with")
    return bare_matmuls(operands)


def bare_matmuls(operands: list[tuple[Tensor, Tensor]]) -> Callable[[], list[Tensor]]:
    """``torch.mm(a, b)`` for each a [M, K], b [K, N] of any strides, into fixed outputs [M, N]."""
    import torch

    outs = [a.new_empty(a.shape[0], b.shape[1]) for a, b in operands]

    def call() -> list[Tensor]:
        for (a, b), out in zip(operands, outs, strict=True):
            torch.mm(a, b, out=out)
        return outs

    return call


BASELINES: dict[str, Builder] = {
    "torch.compile": compiled,
    "torch.compile max-autotune": partial(compiled, mode="max-autotune"),
    "eager": eager,
    "cuBLAS matmul": matmul,
}


def arm(name: str, spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Arm:
    """The named baseline, ready for ``timing.measure``. Raises ValueError for an unknown name."""
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} is unknown; use one of {', '.join(BASELINES)}")
    return Arm(name, BASELINES[name](spec, inputs, sizes))


def formulation(spec: Spec, sizes: Mapping[str, int]) -> Callable[..., dict[str, Tensor]]:
    """The spec's ``baseline``, else its ``reference``, as a function of the input tensors in order.

    Nothing is cast but the outputs, to their declared dtypes: inputs keep theirs and promote as
    PyTorch promotes.
    """
    from verifier.reference import DTYPES, function

    text = function(spec, spec.baseline)
    names = tuple(spec.inputs)
    known = {dim: sizes[dim] for dim in spec.dims} | spec.constants
    dtypes = {name: DTYPES[out.dtype] for name, out in spec.outputs.items()}

    def step(*tensors: Tensor) -> dict[str, Tensor]:
        outs = text(**dict(zip(names, tensors, strict=True)), **known)
        return {name: outs[name].to(dtype) for name, dtype in dtypes.items()}

    # A code object of its own: torch.compile keeps its results by code object and gives up after eight,
    # and every spec and size would share this one.
    return FunctionType(step.__code__.replace(), step.__globals__, spec.name, None, step.__closure__)


def _bind(
    step: Callable[..., dict[str, Tensor]], spec: Spec, inputs: Mapping[str, Tensor]
) -> Callable[[], dict[str, Tensor]]:
    missing = sorted(spec.inputs.keys() - inputs.keys())
    if missing:
        raise ValueError(f"spec {spec.name}: no tensor was given for input {', '.join(missing)}")
    tensors = [inputs[name] for name in spec.inputs]
    return lambda: step(*tensors)


def _operands(call: Callable[[], object]) -> list[tuple[Tensor, Tensor]]:
    """The (a, b) of every matmul that ``call`` runs, in order."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[Tensor, Tensor]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.mm.default:
                found.append((args[0], args[1]))
            elif func is torch.ops.aten.addmm.default:
                found.append((args[1], args[2]))
            return func(*args, **(kwargs or {}))

    # As in verifier.reference: in inference mode linear would arrive here before it is taken apart.
    with torch.inference_mode(False), torch.no_grad(), Recorder():
        call()
    return found
