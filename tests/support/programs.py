"""Random kernels: a source, its signature, sizes that fit, and inputs in sensible ranges.

All choices come from a ``random.Random``: one with a fixed seed, or Hypothesis's own, which can shrink an
example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from writing import Init, Writer

from coda_agent.primitives.compiler.lower import GemmKernel
from coda_agent.primitives.lang.dims import Dim
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_source
from coda_agent.primitives.lang.schedule import CLUSTERS, SWIZZLES, TILES, Schedule
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.runtime.launchable import alignment_errors

Tensors = dict[str, torch.Tensor]


@dataclass
class Made:
    """A random kernel: its signature, its file, the distributions of its inputs (``inits``), and required
    divisors of its dims' sizes (``grains``)."""

    signature: Signature
    source: str
    inits: Mapping[str, Init]
    grains: Mapping[str, int]

    def trace(self) -> Program:
        """Trace the kernel. Raises ProgramError if the program is refused."""
        return trace_source(self.source, self.signature)

    def sizes(self, program: Program, random: Random, large: bool) -> dict[str, int]:
        """Return random, often ragged sizes at which the program can be launched. If ``large`` is true, a
        size may span several tiles."""
        for _ in range(100):
            found = {d: self._size(d, random, large) for d in self.signature.dims}
            if not alignment_errors(program, found):
                return found
        raise ValueError(f"no sizes fit:\n{self.source}")

    def _size(self, dim: str, random: Random, large: bool) -> int:
        grain = self.grains.get(dim, 8)
        if dim == "P":
            return random.choice((32, 64) if large else (32,))
        if dim == "M":
            rows = (1, 77, 200, 1000) if large else (1, 3, 13, 24)
            return -(-random.choice(rows) // grain) * grain
        if dim == "E":
            return random.choice((1, 3, 8, 64) if large else (1, 2, 3, 5))
        if dim in ("H", "J"):
            return random.choice((1, 2, 3, 4, 8, 8) if large else (1, 2, 4, 8, 8))
        return grain * random.randint(1, (576 if large else 24) // grain)

    def draw(self, sizes: Mapping[str, int], seed: int, device: str = "cpu") -> Tensors:
        """Draw inputs from a new generator with this seed."""
        generator = torch.Generator(device).manual_seed(seed)
        return {
            name: _draw(
                [d(sizes) for d in t.shape], self.inits[name], sizes, generator, torch_dtype(t.dtype), device
            )
            for name, t in self.signature.inputs.items()
        }


def _draw(
    shape: list[int],
    init: Init,
    sizes: Mapping[str, int],
    generator: torch.Generator,
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    match init:
        case ("normal", fan):
            std = Dim.parse(fan)(sizes) ** -0.5
            values = torch.randn(shape, generator=generator, device=device) * std
        case ("uniform", low, high):
            values = torch.rand(shape, generator=generator, device=device) * (high - low) + low
        case ("integers", columns):  # some lie below or above the valid range
            high = Dim.parse(columns)(sizes) + 3
            values = torch.randint(-3, high, shape, generator=generator, device=device)
            ignored = torch.rand(shape, generator=generator, device=device) < 0.1
            values = values.masked_fill(ignored, -100)
        case ("rows", rows):
            values = torch.randint(Dim.parse(rows)(sizes), shape, generator=generator, device=device)
        case ("offsets", rows):
            values = _offsets(Dim.parse(rows)(sizes), shape[0] - 1, generator)
        case ("count", period):
            values = torch.arange(shape[0], device=device) % period
        case ("geometric", low, high):
            steps = torch.arange(shape[0], device=device) / shape[0]
            values = low * (high / low) ** steps
        case _:
            raise ValueError(f"init {init!r}")
    return values.to(dtype)


def _offsets(rows: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Choose one of four cases at random, and return the experts' row offsets. Rows go to any expert, only to
    every third expert, or only to one expert; in the fourth case, all but one row go to expert 0."""
    device = generator.device
    drawn = torch.randint(experts, (rows,), generator=generator, device=device)
    case, some = torch.randint(12, (2,), generator=generator, device=device).tolist()
    routed = (drawn, drawn - drawn % 3, drawn * 0 + some % experts, drawn * 0)[case % 4]
    routed[0] = routed[0] if case % 4 < 3 else experts - 1
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return torch.cat([first, torch.bincount(routed, minlength=experts).cumsum(0)])


def make(random: Random, bold: float = 0.03) -> Made:
    """Return a random kernel. ``bold`` is the probability of deliberately breaking a rule."""
    writer = Writer(random, bold)
    writer.write(random.randint(3, 12))
    return Made(writer.signature, writer.source, writer.inits, writer.grains)


def random_program(seed: int) -> Made:
    """Return the random kernel of a seed."""
    return make(Random(seed))


def random_schedule(random: Random, kernel: GemmKernel, sizes: Mapping[str, int]) -> Schedule:
    """Return a random schedule that the GEMM ``kernel`` admits at these static sizes."""
    tiles = [t for t in sorted(TILES) if kernel.admits(Schedule(*t), sizes)]
    tile = random.choice(tiles)
    cluster = random.choice([c for c in CLUSTERS if kernel.admits(Schedule(*tile, *c), sizes)])
    choices = [random.choice((False, True)) for _ in range(3)]  # for two cache hints and the deep mainloop
    split = cluster == (2, 2) and kernel.offsets is None and random.choice((False, True))
    return Schedule(*tile, *cluster, random.choice(SWIZZLES), *choices)._replace(split=split)
