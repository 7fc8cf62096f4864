"""The interface of a layer's variants. A variant is built once, and called many times on the current CUDA
stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

Stream = TypeVar("Stream")
Saved = TypeVar("Saved")
Gradients = dict[str, Tensor]


class Layer(ABC, Generic[Stream, Saved]):
    """One layer. Layers of the same variant can be stacked: each layer takes the ``Stream`` that the layer
    before it returned.

    ``forward``, ``train``, ``backward`` and ``step`` launch GPU work and return without waiting for it.
    ``start``, ``outputs`` and ``gradients`` convert layouts and are not timed.
    """

    @abstractmethod
    def start(self, x: Tensor) -> Stream:
        """The stream that a previous layer with the output x [tokens, D] would pass to this layer."""

    @abstractmethod
    def forward(self, stream: Stream) -> Stream:
        """Run the layer for inference, without storing values for a backward."""

    @abstractmethod
    def train(self, stream: Stream) -> tuple[Stream, Saved]:
        """Run the forward; return the output stream and the values that the backward needs."""

    @abstractmethod
    def backward(self, saved: Saved, dout: Tensor) -> Gradients:
        """The gradients of the layer's input ("x") and of its ``Weights``, by name and in the variant's own
        layout. ``dout`` [tokens, D] is the gradient of the residual stream that the layer returned. ``saved``
        may be used only once."""

    def step(self, stream: Stream, dout: Tensor) -> Gradients:
        """Run the forward and the backward."""
        return self.backward(self.train(stream)[1], dout)

    @abstractmethod
    def outputs(self, stream: Stream) -> dict[str, Tensor]:
        """Extract the layer's outputs from the stream that the layer returned: "y" [tokens, D], and "normed"
        (y after the next norm)."""

    def arranged(self) -> tuple[Tensor, ...]:
        """The tensors that the variant keeps in its own layout, such as reordered weights. A user would store
        only the reordered weights, not the weights in the plain layout."""
        return ()

    def gradients(self, found: Mapping[str, Tensor]) -> Gradients:
        """Convert gradients from ``backward`` to the layout of ``Weights``."""
        return dict(found)
