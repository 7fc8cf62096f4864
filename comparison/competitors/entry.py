"""How one library computes one spec: what every file of this package is made of.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.verifier.baselines.quack_epilogue import Given

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "Given", "Prepared", "followed", "multiplied"]


class Prepared(NamedTuple):
    """``call`` launches all work of one call on the current CUDA stream, and does not wait for it. ``read``
    takes what a call gave and gives outputs of the spec by name, in the spec's layout, as far as the
    library has them: outside the clock. ``arranged``: operands in the library's own layout, made outside the
    clock, which a user would keep in place of the spec's: no memory that a call holds."""

    call: Callable[[], Any]
    read: Callable[[Any], dict[str, Tensor]]
    arranged: tuple[Tensor, ...] = ()

    @property
    def arranged_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.arranged)


def followed(
    first: Prepared, w: Tensor, rows: int, name: str, multiply: Callable[[Tensor, Tensor, Tensor], Any]
) -> Prepared:
    """``first``, and a product more: ``multiply(a, w.mT, out)`` of the [rows, K] that it gives second and w
    [N, K], an output of this name."""
    out = w.new_empty(rows, w.shape[0])

    def call() -> Any:
        found = first.call()
        multiply(found[1], w.mT, out)
        return found

    return Prepared(call, lambda found: first.read(found) | {name: out}, first.arranged)


def multiplied(a: Tensor, b: Tensor, out: Tensor) -> None:
    """cuBLAS's product."""
    import torch

    torch.mm(a, b, out=out)


@dataclass(frozen=True)
class Entry:
    """``note``: what is prepared outside the clock, what PyTorch adds to the library's operators, and what
    is given in place of an output; for a reader of the table."""

    build: Callable[[Given], Prepared]
    note: str = ""
