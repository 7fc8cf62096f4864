"""One fused GEMM of QuACK on existing tensors, and helpers for the entries of ``quack_library``.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from quack.gemm_config import GemmConfig
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class QuackEpilogue:
    """A GEMM with one of QuACK's epilogues, on existing tensors. The GEMM computes D = epilogue(a @ b, c,
    operands); with ``accumulate``, it adds this result to D.

    ``outs`` are the output buffers under QuACK's names ("D" and the names that the epilogue declares). If a
    buffer is an output of the spec, ``names`` maps QuACK's name to the spec's name. Each call runs ``start``
    before the GEMM and ``finish`` after it. ``finish`` takes the kernel's partial results under QuACK's
    names, and returns the spec's outputs that ``names`` does not list.
    """

    mod: Any
    a: Tensor  # [M, K], any strides
    b: Tensor  # [K, N], any strides
    outs: dict[str, Tensor]
    names: dict[str, str]
    c: Tensor | None = None
    operands: dict[str, Any] = field(default_factory=dict)
    accumulate: bool = False
    start: Callable[[], object] = lambda: None
    finish: Callable[[Tensors], dict[str, Tensor]] = lambda partials: {}

    @property
    def paired(self) -> bool:
        """Whether the epilogue works on pairs of adjacent columns."""
        return bool(self.mod.mode != "element")

    def prepare(self, config: GemmConfig) -> Callable[[], dict[str, Tensor]]:
        """Compile for ``config``; return a call that launches the kernel and returns the spec's outputs by
        name.

        All calls and configs share the output buffers.
        """
        more = {"add_to_output": True} if self.accumulate else {}
        plan = self.mod.plan(self.a, self.b, self.c, out=self.outs, config=config, **more, **self.operands)
        stored = {wanted: self.outs[name] for name, wanted in self.names.items()}

        def call() -> dict[str, Tensor]:
            self.start()
            plan.run(self.a, self.b, self.c, out=self.outs, **self.operands)
            return stored | self.finish(plan.scratch)

        return call


class Given(NamedTuple):
    """One case of a spec: its inputs on the GPU, its sizes and its constants."""

    inputs: Tensors
    sizes: Mapping[str, int]
    constants: Mapping[str, float]

    def number(self, name: str) -> float:
        """The value of a constant or of a scalar input, as a Python float, because QuACK takes such values
        from the host."""
        return self.constants[name] if name in self.constants else float(self.inputs[name])


Build = Callable[[Given], tuple[QuackEpilogue, ...]]


@dataclass(frozen=True)
class QuackImplementation:
    """How QuACK computes a spec. ``kind``: whether the epilogues are QuACK's own or composed by us. ``build``
    returns the epilogues in order.

    ``inexact``: fp32 outputs that fail our error gate, because the library uses the hardware's approximate
    tanh.
    """

    kind: Literal["library", "composed"]
    build: Build
    inexact: tuple[str, ...] = ()


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` with torch.compile, so that it runs as one kernel instead of several.

    Each combination of argument shapes is compiled separately. By default, torch.compile would compile for
    dynamic shapes at the second combination, and the result would be slower.
    """

    def call(*given: Any) -> Any:
        return _compile(function, tuple(getattr(each, "shape", each) for each in given))(*given)

    return call


@cache
def _compile(function: Callable[..., Any], shapes: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile ``function`` once per ``shapes``, which are the shapes of tensor arguments and the values of
    other arguments."""
    from coda_agent.verifier.baselines.pytorch import under_compile

    compiled: Callable[..., Any] = under_compile(function, "default")
    return compiled


def column_sum(partials: Tensors, *, name: str, out: Tensor) -> dict[str, Tensor]:
    import torch

    return {name: torch.sum(partials[name], dim=0, out=out)}


def fp32(like: Tensor, *shape: int) -> Tensor:
    import torch

    return like.new_empty(shape, dtype=torch.float32)
