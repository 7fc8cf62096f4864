"""Define entries. An entry says how one library computes one spec. Importing this module imports nothing
heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.verifier.baselines.quack_epilogue import Given

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Implementation", "Given", "Prepared", "followed", "gated_mlp"]


class Prepared(NamedTuple):
    """A prepared arm (one library's implementation of a spec).

    ``call`` launches all work of one call on the current CUDA stream, and returns before the work is done.
    ``read`` is not timed. It converts the call's result into the spec's outputs by name; outputs that the
    library does not compute are missing. ``arranged``: operands in the library's own layout, prepared before
    timing. A user would store the arranged operands in place of the spec's operands, so the arranged operands
    do not count as memory of a call.
    """

    call: Callable[[], Any]
    read: Callable[[Any], dict[str, Tensor]]
    arranged: tuple[Tensor, ...] = ()

    @property
    def arranged_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.arranged)


def multiplied(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Multiply two matrices with cuBLAS, and write the result to ``out``."""
    import torch

    torch.mm(a, b, out=out)


def followed(
    first: Prepared,
    w: Tensor,
    rows: int,
    name: str,
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = multiplied,
) -> Prepared:
    """Return an arm that runs ``first`` and then another matmul, ``multiply(a, w.mT, out)``. ``a`` [rows, K]
    is the second result of ``first``, and ``w`` is [N, K]. ``name``: the name of the matmul's output."""
    out = w.new_empty(rows, w.shape[0])

    def call() -> Any:
        found = first.call()
        multiply(found[1], w.mT, out)
        return found

    return Prepared(call, lambda found: first.read(found) | {name: out}, first.arranged)


def gated_mlp(
    g: Given,
    swiglu: Callable[[Given], Prepared],
    multiply: Callable[[Tensor, Tensor, Tensor], Any] = multiplied,
) -> Prepared:
    """Return an arm of a whole MLP: the library's ``swiglu``, then the product with the second weight."""
    x = g.inputs["x"]
    first = swiglu(Given({"x": x, "w": g.inputs["w_gate_up"]}, g.sizes, g.constants))
    return followed(first, g.inputs["w_down"], x.shape[0], "out", multiply)


@dataclass(frozen=True)
class Implementation:
    """One library's way to compute one spec. ``note`` tells readers which operands are prepared before the
    timed call, which parts PyTorch computes, and which results replace an output of the spec."""

    build: Callable[[Given], Prepared]
    note: str = ""
