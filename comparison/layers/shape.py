"""The shape of a Transformer layer, its weights and its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6  # epsilon of all norms, as in the kernels' specs
BASE = 10_000.0  # base of the rotary frequencies


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer with full causal attention. ``sequences``: the number of sequences, each of
    ``length`` tokens. ``heads``: the number of query heads. ``groups``: the number of key heads, and of value
    heads; 0 means as many as ``heads``."""

    heads: int
    head_width: int
    ffn: int
    sequences: int = 8
    length: int = 2048
    groups: int = 0

    @property
    def width(self) -> int:
        """The model's width."""
        return self.heads * self.head_width

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def pairs(self) -> int:
        """The number of rotated column pairs in a head."""
        return self.head_width // 2

    @property
    def projections(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        others = (self.groups or self.heads) * self.head_width
        return self.width, others, others

    def apart(self, t: Tensor) -> Tensor:
        """Return a view of ``t`` [tokens, heads * head width] as [sequences, heads, length, head width]."""
        return t.view(self.sequences, self.length, -1, self.head_width).transpose(1, 2)

    def together(self, t: Tensor) -> Tensor:
        """Return ``t`` [sequences, heads, length, head width] as [tokens, width]. The result is a view if
        ``t`` comes from ``apart``."""
        return t.transpose(1, 2).reshape(self.tokens, self.width)


# Layer shapes with the widths of the specs' cases.
WIDTHS = {"1B": Shape(32, 64, 5632), "7B": Shape(32, 128, 11008), "70B": Shape(64, 128, 22016)}
# Llama 3's sizes, with grouped heads.
GROUPED = {
    "1B grouped": Shape(32, 64, 8192, groups=8),
    "8B grouped": Shape(32, 128, 14336, groups=8),
    "70B grouped": Shape(64, 128, 28672, groups=8),
}


class Weights(NamedTuple):
    """The weights of a layer of width D with an FFN of width F. Matrices are [out, in], as in
    torch.nn.Linear."""

    attention_norm: Tensor  # [D]
    qkv: Tensor  # [sum(projections), D]: q, then k, then v; the rows of a rotated pair are half a head apart
    out: Tensor  # [D, D]
    ffn_norm: Tensor  # [D]
    gate_up: Tensor  # [2*F, D]: all gate rows, then all up rows
    down: Tensor  # [D, F]


class Drawn(NamedTuple):
    """A layer's weights and inputs. ``next_norm`` [D]: the weight of the norm after the layer. ``x`` and
    ``dout`` [tokens, D]: the layer's input, and the gradient of its output."""

    weights: Weights
    next_norm: Tensor
    x: Tensor
    dout: Tensor


def draw(shape: Shape, seed: int, device: torch.device | str = "cuda") -> Drawn:
    """Draw random weights and inputs in bf16: normal activations, norm weights from 0.5 to 1.5, and matrices
    whose products are about as large as the activations."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, std: float = 1.0) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return values.mul_(std).bfloat16()

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, columns**-0.5)

    def norm() -> Tensor:
        return (torch.rand(shape.width, generator=generator, device=device) + 0.5).bfloat16()

    width, ffn = shape.width, shape.ffn
    weights = Weights(
        attention_norm=norm(),
        qkv=linear(sum(shape.projections), width),
        out=linear(width, width),
        ffn_norm=norm(),
        gate_up=linear(2 * ffn, width),
        down=linear(width, ffn),
    )
    return Drawn(weights, norm(), normal(shape.tokens, width), normal(shape.tokens, width))


def rotary(shape: Shape, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation, each [length, head width] in bf16. The right half of the columns
    equals the left half."""
    steps = torch.arange(shape.pairs, device=device, dtype=torch.float32) / shape.pairs
    angles = torch.arange(shape.length, device=device, dtype=torch.float32)[:, None] * BASE**-steps
    both = torch.cat((angles, angles), -1)
    return both.cos().bfloat16(), both.sin().bfloat16()
