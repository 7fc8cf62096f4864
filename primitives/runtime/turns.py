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
    launches.

    So threads enqueue one after another. A stream first waits for the stream of the previous call, if that
    was another one. A stream that is being captured into a CUDA graph must not wait, so the graph's user must
    order its replays.
    """

    def __init__(self, streams: Streams | None, tensors: Iterable[torch.Tensor]):
        """``streams`` is None on a device without streams. The current stream comes first, because it created
        the tensors."""
        self.lock = threading.Lock()
        self._streams, self._tensors = streams, list(tensors)
        self._last = streams.current() if streams else None
        self._handle = streams.handle() if streams else 0

    def take(self) -> None:
        """Let the current stream run next. The caller holds ``lock``."""
        if self._streams and (handle := self._streams.handle()) != self._handle:
            self._follow(self._streams, handle)

    def _follow(self, streams: Streams, handle: int) -> None:
        if streams.capturing():
            return
        stream = streams.current()
        stream.wait_stream(self._last)
        # so that their memory stays reserved until this stream has finished with it
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._last, self._handle = stream, handle
