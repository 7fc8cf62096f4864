"""What every variant of a layer offers: built once, called many times, all on the current CUDA stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

Stream = TypeVar("Stream")
Saved = TypeVar("Saved")
Gradients = dict[str, Tensor]


class Layer(ABC, Generic[Stream, Saved]):
    """One layer. Layers of one variant chain: a ``Stream`` is what a layer hands to the next.

    ``forward``, ``train``, ``backward`` and ``step`` launch work and wait for none of it. ``start``,
    ``outputs`` and ``gradients`` translate, outside the clock.
    """

    @abstractmethod
    def start(self, x: Tensor) -> Stream:
        """What the layer before would hand on, of its output [tokens, D]."""

    @abstractmethod
    def forward(self, stream: Stream) -> Stream:
        """Inference: nothing is kept for a backward."""

    @abstractmethod
    def train(self, stream: Stream) -> tuple[Stream, Saved]:
        """Forward, and what the backward needs."""

    @abstractmethod
    def backward(self, saved: Saved, dout: Tensor) -> Gradients:
        """The gradients of the layer's input, "x", and of each of its ``Weights``, by name, in the variant's
        own layout. ``dout`` [tokens, D] is that of the residual stream which the layer gave; ``saved`` is
        good for one call."""

    def step(self, stream: Stream, dout: Tensor) -> Gradients:
        """Forward and backward."""
        return self.backward(self.train(stream)[1], dout)

    @abstractmethod
    def outputs(self, stream: Stream) -> dict[str, Tensor]:
        """Of a stream that the layer gave: "y" [tokens, D], and what the next norm makes of it, "normed"."""

    def arranged(self) -> tuple[Tensor, ...]:
        """Copies of weights in the variant's own layout, which one would keep in place of the drawn ones."""
        return ()

    def gradients(self, found: Mapping[str, Tensor]) -> Gradients:
        """Gradients that ``backward`` gave, in the layout of ``Weights``."""
        return dict(found)
