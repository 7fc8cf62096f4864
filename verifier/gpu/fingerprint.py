"""Treat tensors' memory as integers: compute fingerprints that detect changes, and overwrite memory with
poison."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 24  # words hashed at a time; their weights take 128 MiB


class Fingerprints:
    """Fingerprints of tensors by name, computed with a common secret.

    Two tensors that differ in any bit have equal fingerprints with a probability below 2**-32, unless the
    code that changed the bits knew the secret. Every word of at most 32 bits is multiplied by a random 63-bit
    weight, and the products are summed modulo 2**64. This is a multilinear hash. Two values of a word differ
    by less than 2**32, so a random weight hides the difference with a probability of at most 2**-33. Shape,
    dtype and strides must agree too. A kernel that reads out of bounds cannot find the weights: their
    generator's seed stays on the host, and the weights are wiped after use.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._secret = secrets.randbits(63)
        self._found = {name: self._of(t) for name, t in tensors.items()}

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of the tensors that do not match the fingerprint of the same name."""
        return [name for name, t in tensors.items() if self._of(t) != self._found[name]]

    def _of(self, tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.dtype, tuple(tensor.shape), tensor.stride(), self._sum(words(tensor.contiguous()))

    def _sum(self, flat: torch.Tensor) -> int:
        import torch

        generator = torch.Generator(flat.device).manual_seed(self._secret)
        room = torch.empty(min(BLOCK, flat.numel()), dtype=torch.int64, device=flat.device)
        total = 0
        for block in flat.split(BLOCK):
            weights = room[: block.numel()].random_(generator=generator)
            total += int(weights.mul_(block).sum())
        room.zero_()
        return total % 2**64


def words(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a vector of integers. The integers have 32 bits if the tensor's offset
    and size allow, else 16 or 8."""
    import torch

    flat = tensor.view(-1)
    first, size = flat.storage_offset() * flat.itemsize, flat.numel() * flat.itemsize
    fitting = (t for t in (torch.int32, torch.int16) if not first % t.itemsize and not size % t.itemsize)
    return flat.view(next(fitting, torch.int8))


def overwrite(rows: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors with poison. ``rows``: the results of ``words`` for these tensors.

    Each call draws new poison. The poison resembles a result: as a 16-bit or 32-bit float it is finite and
    between 0 and 2. A kernel that writes nothing leaves the poison, so it cannot pass off the result of an
    earlier call as its own.
    """
    half, other = (0x3C00 | secrets.randbits(10) for _ in range(2))
    for row in rows:
        row.fill_((half << 16 | other) >> (32 - 8 * row.itemsize))
