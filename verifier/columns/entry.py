"""How one library computes one spec: what every file of this package is made of.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from verifier.quack_epilogue import Given

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "Given", "Prepared"]


class Prepared(NamedTuple):
    """``call`` launches all work of one call on the current CUDA stream, and does not wait for it. ``read``
    takes what a call gave and gives outputs of the spec by name, in the spec's layout, as far as the
    library has them: outside the clock."""

    call: Callable[[], Any]
    read: Callable[[Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """``note``: what is prepared outside the clock, what PyTorch adds to the library's operators, and what
    is given in place of an output; for a reader of the table."""

    build: Callable[[Given], Prepared]
    note: str = ""
