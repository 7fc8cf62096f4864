"""Order the threads and CUDA streams that share one workspace."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Streams(Protocol):
    """The streams of one device."""

    def handle(self) -> int:
        """The current stream's number, which is cheap to read."""

    def current(self) -> Any:
        """The current stream."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""


class CudaStreams:
    """PyTorch's streams of a CUDA device."""

    def __init__(self, device: torch.device):
        import torch

        self._torch = torch
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._handle = torch._C._cuda_getCurrentRawStream

    def handle(self) -> int:
        return self._handle(self._index)

    def current(self) -> Any:
        return self._torch.cuda.current_stream(self._index)

    def capturing(self) -> bool:
        with self._torch.cuda.device(self._index):
            return bool(self._torch.cuda.is_current_stream_capturing())


class Turns:
    """Orders the calls that share tensors. A call holds ``lock`` while it calls ``take()`` and enqueues its
    launches, so threads enqueue one after another.

    ``take()`` makes the current stream wait for the previous call's stream, if the two streams differ. A
    stream that is being captured into a CUDA graph cannot wait, so the user must order the graph's replays.
    """

    def __init__(self, streams: Streams | None, tensors: Iterable[torch.Tensor]):
        """``streams``: None on a device without streams. Create this object on the stream that created the
        ``tensors``, because the first call waits for the stream that is current now."""
        self.lock = threading.Lock()
        self._streams, self._tensors = streams, list(tensors)
        self._last = streams.current() if streams else None
        self._handle = streams.handle() if streams else 0

    def take(self) -> None:
        """Make the current stream wait for the previous call's stream. The caller holds ``lock``."""
        if self._streams and (handle := self._streams.handle()) != self._handle:
            self._follow(self._streams, handle)

    def _follow(self, streams: Streams, handle: int) -> None:
        if streams.capturing():
            return
        stream = streams.current()
        stream.wait_stream(self._last)
        # PyTorch must not reuse the tensors' memory before this stream has finished using the tensors.
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._last, self._handle = stream, handle
