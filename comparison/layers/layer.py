"""The interface of all variants of a layer: built once, called many times, on the current CUDA stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

Stream = TypeVar("Stream")
Saved = TypeVar("Saved")
Gradients = dict[str, Tensor]


class Layer(ABC, Generic[Stream, Saved]):
    """One layer. Layers of one variant chain: a layer passes a ``Stream`` to the next.

    ``forward``, ``train``, ``backward`` and ``step`` launch work and do not wait. ``start``, ``outputs`` and
    ``gradients`` translate, outside the clock.
    """

    @abstractmethod
    def start(self, x: Tensor) -> Stream:
        """The stream from the previous layer, given that layer's output [tokens, D]."""

    @abstractmethod
    def forward(self, stream: Stream) -> Stream:
        """Inference: nothing is stored for a backward."""

    @abstractmethod
    def train(self, stream: Stream) -> tuple[Stream, Saved]:
        """Forward, with the values that the backward needs."""

    @abstractmethod
    def backward(self, saved: Saved, dout: Tensor) -> Gradients:
        """The gradients of the layer's input, "x", and of each of its ``Weights``, by name, in the variant's
        own layout. ``dout`` [tokens, D] is the gradient of the residual stream that the layer returned.
        ``saved`` is valid for one call."""

    def step(self, stream: Stream, dout: Tensor) -> Gradients:
        """Forward and backward."""
        return self.backward(self.train(stream)[1], dout)

    @abstractmethod
    def outputs(self, stream: Stream) -> dict[str, Tensor]:
        """From a stream that the layer returned: "y" [tokens, D], and "normed", its value after the next
        norm."""

    def arranged(self) -> tuple[Tensor, ...]:
        """Copies of weights in the variant's own layout, which a user would store in place of the drawn
        ones."""
        return ()

    def gradients(self, found: Mapping[str, Tensor]) -> Gradients:
        """Gradients from ``backward``, in the layout of ``Weights``."""
        return dict(found)
