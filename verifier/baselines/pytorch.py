"""PyTorch baselines: the plain PyTorch code of a spec (its ``formulation``), compiled and eager; and only the
matmuls of this code, in cuBLAS.

``BASELINES`` maps names to builders. A builder takes (spec, sets of inputs, sizes) and returns one call per
set. The call takes no arguments and launches the work on the current stream. QuACK's kernels need a search
over schedules, so they are in ``verifier.baselines.quack``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# torch.compile's "max-autotune" replays CUDA graphs, which first copy every input into the graph's own
# memory. Users who keep inputs in place do not pay for that copy. CUDA graphs also save launch time on the
# host, but our timings do not include launch time.
MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}

Step = Callable[..., "dict[str, Tensor]"]
Sets = Sequence[Mapping[str, "Tensor"]]
Builder = Callable[[Spec, Sets, Mapping[str, int]], Sequence[Callable[[], object]]]


_steps: dict[tuple[Any, ...], Step] = {}


def compiled(
    spec: Spec, sets: Sets, sizes: Mapping[str, int], mode: str = "default", backend: str = "inductor"
) -> list[Callable[[], dict[str, Tensor]]]:
    """Calls of the ``formulation`` under ``torch.compile``, one per set of inputs. The first call compiles
    the formulation for these sizes, once per process. ``mode``: "default" or "max-autotune" (without CUDA
    graphs)."""
    key = spec.hash, tuple(sorted(sizes.items())), mode, backend
    if key not in _steps:
        _steps[key] = under_compile(formulation(spec, sizes), mode, backend)
    return [_bind(_steps[key], spec, inputs) for inputs in sets]


def under_compile(step: Callable[..., Any], mode: str, backend: str = "inductor") -> Any:
    """Wrap a function in ``torch.compile``, with fullgraph and static shapes. The function gets its own code
    object, because Dynamo caches at most eight results per code object. With one code object, all specs and
    sizes would share these eight results. Raises ValueError for a mode outside ``MODES``."""
    import torch
    import torch._inductor.config

    # The compiler would print a message for every choice. The compiler also refuses some configurations,
    # which is a normal part of its search.
    torch._inductor.config.autotune_num_choices_displayed = 0
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    if mode not in MODES:
        raise ValueError(f"torch.compile mode {mode!r} is unknown; use one of {', '.join(MODES)}")
    assert isinstance(step, FunctionType)
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend, mode=MODES[mode])


def eager(spec: Spec, sets: Sets, sizes: Mapping[str, int]) -> list[Callable[[], dict[str, Tensor]]]:
    """Calls that run the ``formulation`` without a compiler, one per set of inputs."""
    step = formulation(spec, sizes)
    return [_bind(step, spec, inputs) for inputs in sets]


def matmuls(spec: Spec, sets: Sets, sizes: Mapping[str, int]) -> list[Callable[[], list[Tensor]]]:
    """Calls that run only the formulation's matmuls, in cuBLAS, one per set of inputs. A call uses
    ``torch.mm`` with the formulation's operands and output dtypes. All calls write into the same preallocated
    outputs. The formulation runs once per set, to collect the matmuls.

    ``torch.mm`` takes no fp8 operands, so fp8 matmuls use ``torch._scaled_mm`` with the formulation's scales,
    output dtype and accumulation mode. cuBLAS applies the scales within the matmul. A bias in the formulation
    is left out. Raises ValueError for a formulation without a matmul.
    """
    every = [products(spec, inputs, sizes) for inputs in sets]
    outs = [p.out() for p in every[0]]
    return [partial(_multiplied, found, outs) for found in every]


class Product(NamedTuple):
    """A matmul of a formulation: operands a [M, K] and b [K, N] with any strides, and the output's dtype.

    ``ends``: for a grouped matmul, the row at which each group ends; b is then [E, K, N], one matrix per
    group. ``scales``: the scales of fp8 operands a and b. ``fast_accum``: the accumulation mode that the
    formulation requests.
    """

    a: Tensor
    b: Tensor
    dtype: torch.dtype
    scales: tuple[Tensor, Tensor] | None = None
    fast_accum: bool = False
    ends: Tensor | None = None

    def out(self) -> Tensor:
        """An empty output, [M, N]."""
        return self.a.new_empty(self.a.shape[0], self.b.shape[-1], dtype=self.dtype)

    def into(self, out: Tensor) -> None:
        """Compute this matmul again. The result goes into ``out``. A grouped matmul ignores ``out``, because
        its PyTorch function takes no output buffer."""
        import torch

        if self.ends is not None:
            torch._grouped_mm(self.a, self.b, offs=self.ends, out_dtype=self.dtype)
        elif self.scales is not None:
            fast, (a, b) = self.fast_accum, self.scales
            torch._scaled_mm(self.a, self.b, a, b, out_dtype=self.dtype, use_fast_accum=fast, out=out)
        elif self.dtype != self.a.dtype:
            torch.mm(self.a, self.b, out_dtype=self.dtype, out=out)
        else:
            torch.mm(self.a, self.b, out=out)


def _multiplied(found: list[Product], outs: list[Tensor]) -> list[Tensor]:
    for product, out in zip(found, outs, strict=True):
        product.into(out)
    return outs


CUBLAS, MAX_AUTOTUNE = "cuBLAS matmul", "torch.compile max-autotune"
BASELINES: dict[str, Builder] = {
    "torch.compile": compiled,
    MAX_AUTOTUNE: partial(compiled, mode="max-autotune"),
    "eager": eager,
    CUBLAS: matmuls,
}


def calls(name: str, spec: Spec, sets: Sets, sizes: Mapping[str, int]) -> Sequence[Callable[[], object]]:
    """The calls of the named baseline, one per set of inputs. Raises ValueError for an unknown name."""
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} is unknown; use one of {', '.join(BASELINES)}")
    return BASELINES[name](spec, sets, sizes)


def formulation(spec: Spec, sizes: Mapping[str, int]) -> Callable[..., dict[str, Tensor]]:
    """The spec's ``baseline``, or its ``reference`` if it has no baseline, as a function of the input tensors
    in the spec's order.

    Only outputs are cast to their declared dtypes, with saturation for fp8. Inputs (including scalars,
    integers and fp8 tensors) keep their dtypes and follow PyTorch's promotion rules. An output that
    ``updates`` an input is written into that input's tensor, so every call changes the input.
    """
    from coda_agent.primitives.lang.interpret import rounded
    from coda_agent.verifier.numerics.reference import function

    text = function(spec, spec.baseline)
    names = tuple(spec.inputs)
    known = {dim: sizes[dim] for dim in spec.dims} | spec.constants
    dtypes = {name: out.dtype for name, out in spec.outputs.items()}
    updates = spec.signature().updates

    def step(*tensors: Tensor) -> dict[str, Tensor]:
        given = dict(zip(names, tensors, strict=True))
        outs = text(**given, **known)
        cast = {name: rounded(outs[name], dtype) for name, dtype in dtypes.items()}
        return cast | {name: given[target].copy_(cast[name]) for name, target in updates.items()}

    step.__name__ = spec.name
    return step


def _bind(
    step: Callable[..., dict[str, Tensor]], spec: Spec, inputs: Mapping[str, Tensor]
) -> Callable[[], dict[str, Tensor]]:
    missing = sorted(spec.inputs.keys() - inputs.keys())
    if missing:
        raise ValueError(f"spec {spec.name}: no tensor was given for input {', '.join(missing)}")
    tensors = [inputs[name] for name in spec.inputs]
    return lambda: step(*tensors)


def products(spec: Spec, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> list[Product]:
    """Run the formulation once; return the formulation's matmuls in order. Raises ValueError if the
    formulation has no matmul."""
    found = _recorded(*eager(spec, [inputs], sizes))
    if not found:
        raise ValueError(f"spec {spec.name}: its formulation has no matmul to compare with")
    return found


def _recorded(call: Callable[[], object]) -> list[Product]:
    """Run ``call``; return the matmuls that PyTorch computed meanwhile, in order."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[Product] = []
    aten = torch.ops.aten
    plain = {aten.mm.default: 0, aten.mm.dtype: 0, aten.addmm.default: 1, aten.addmm.dtype: 1}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in plain:
                a, b = args[plain[func] :][:2]
                found.append(Product(a, b, result.dtype))
            elif func is aten._grouped_mm.default and args[1].dim() == 3:
                ends = args[2] if len(args) > 2 else (kwargs or {})["offs"]
                found.append(Product(args[0], args[1], result.dtype, ends=ends))
            elif func is aten._scaled_mm.default:
                bound = dict(zip((x.name for x in func._schema.arguments), args, strict=False))
                bound |= kwargs or {}
                scales = bound["scale_a"], bound["scale_b"]
                fast = bool(bound.get("use_fast_accum"))
                found.append(Product(bound["self"], bound["mat2"], result.dtype, scales, fast))
            return result

    # Inference mode is off, as in numerics.reference. In inference mode, ``linear`` would arrive here as one
    # operation instead of a matmul.
    with torch.inference_mode(False), torch.no_grad(), Recorder():
        call()
    return found
