"""Put tensors between poisoned bytes (guard bands). No kernel may write these bytes, and the bytes must not
affect a kernel's results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GUARD = 4096  # bytes before and after a tensor; enough to align the tensor like a separate allocation
# The two poisons, as byte values. A float whose bytes all have the first value is NaN; with the second value,
# it is an ordinary number. So a result that depends on the poison differs between the two poisons.
POISONS = (0xFF, 0x7B)


class Guarded:
    """Tensors by name, each filled with poison, in the middle of a larger poisoned buffer. The tensors have
    the shapes and dtypes of ``like``, and the strides of fresh tensors."""

    def __init__(self, like: Mapping[str, torch.Tensor], poison: int):
        self.tensors: dict[str, torch.Tensor] = {}
        self._bands: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, tensor in like.items():
            self.tensors[name], self._bands[name] = _between_bands(tensor, poison)

    @classmethod
    def holding(cls, tensors: Mapping[str, torch.Tensor], poison: int) -> Guarded:
        """Copies of the tensors, each in the middle of a poisoned buffer."""
        made = cls(tensors, poison)
        for name, tensor in tensors.items():
            made.tensors[name].copy_(tensor)
        return made

    def poison(self, byte: int) -> None:
        """Poison the bands with another byte; the tensors are unchanged."""
        for bands in self._bands.values():
            for band in bands:
                band.fill_(byte)

    def written_beside(self, poison: int) -> list[str]:
        """The names of the tensors whose bands no longer hold only poison."""
        return [name for name, bands in self._bands.items() if not untouched(bands, poison)]


def untouched(bands: Iterable[torch.Tensor], poison: int) -> bool:
    return all(bool((band == poison).all()) for band in bands)


def _between_bands(like: torch.Tensor, poison: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    import torch

    size = like.numel() * like.itemsize
    room = -(-size // 256) * 256
    buffer = torch.full((room + 2 * GUARD,), poison, dtype=torch.uint8, device=like.device)
    bands = buffer[:GUARD], buffer[GUARD + size :]
    return buffer[GUARD : GUARD + size].view(like.dtype).view(like.shape), bands
