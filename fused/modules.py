"""Modules of a Llama-like model, for PyTorch programs without a Hugging Face model.

Weights have the names and layouts of Hugging Face's Llama, so that Llama's checkpoints can be loaded. A
stream is [..., length, D]. The forwards raise TypeError under autocast to another dtype than the weights'.
Attention is causal over whole sequences: there is no padding mask, no cache, no sliding window and no packing
of several sequences into one.

Modules are made in PyTorch's default dtype, and raise TypeError if no kernel takes it. They raise ValueError
for sizes that no kernel takes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coda_agent.fused import functional, loss
from coda_agent.fused.functional import GRAIN
from coda_agent.fused.pointwise.norm import rms_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # fp32 on a CPU only


def _linear(columns: int, rows: int) -> nn.Linear:
    if (dtype := torch.get_default_dtype()) not in DTYPES:
        raise TypeError(f"kernels do not take {dtype}: call torch.set_default_dtype(torch.bfloat16) before")
    if min(columns, rows) <= 0 or columns % GRAIN or rows % GRAIN:
        raise ValueError(f"a weight of {rows} x {columns}: both must be positive multiples of {GRAIN}")
    return nn.Linear(columns, rows, bias=False)


def _norm(module: nn.RMSNorm) -> functional.Norm:
    if module.eps is None:
        raise ValueError("the RMSNorm has eps=None: make it with torch.nn.RMSNorm(width, eps=1e-6)")
    return functional.Norm(module.weight, module.eps)


def _check_autocast(weight: Tensor) -> None:
    if functional.matmul_dtype(weight) != weight.dtype:
        raise TypeError(
            f"these modules compute in their weights' dtype, {weight.dtype}, and do not follow autocast: "
            "convert the module, as in module.to(torch.bfloat16)"
        )


class MLP(nn.Module):
    """An MLP from ``width`` columns to ``hidden`` and back. ``activation``: swiglu, geglu (tanh form), gelu
    (tanh form) or relu2; swiglu and geglu have a ``gate_proj``. Raises ValueError for another activation."""

    def __init__(self, width: int, hidden: int, activation: str = "swiglu"):
        super().__init__()
        functional.link_of(functional.MLP, activation)  # raises ValueError for an unknown activation
        self.activation = activation
        if activation in functional.GATED:
            self.gate_proj = _linear(width, hidden)
        self.up_proj, self.down_proj = _linear(width, hidden), _linear(hidden, width)

    @property
    def up(self) -> Tensor:
        """The first matmul's weight: [F, D], or the interleaved rows of gate and up [2*F, D]."""
        up = self.up_proj.weight
        return functional.paired(self.gate_proj.weight, up) if self.activation in functional.GATED else up

    def forward(self, x: Tensor, norm: nn.RMSNorm, residual: bool = True) -> Tensor:
        """Compute ``x + mlp(norm(x))``; without ``residual``, ``mlp(norm(x))``. Raises ValueError if ``norm``
        has no eps."""
        down = self.down_proj.weight
        _check_autocast(down)
        return functional.feed_forward(x, _norm(norm), self.up, down, self.activation, residual)


class Attention(nn.Module):
    """Grouped-query attention, with its projections. ``heads``: the number of query heads, a multiple of
    ``kv_heads``, the number of key heads and of value heads. Each head has ``head_width`` columns. Raises
    ValueError if no tile suits heads of that width."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_width: int):
        super().__init__()
        if kv_heads <= 0 or heads <= 0 or heads % kv_heads:
            raise ValueError(f"{heads} query heads must be a positive multiple of {kv_heads} key heads")
        if not functional.rotates(head_width):
            raise ValueError(f"no tile suits heads of {head_width} columns; use a width such as 64 or 128")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.q_proj = _linear(width, heads * head_width)
        self.k_proj, self.v_proj = (_linear(width, kv_heads * head_width) for _ in range(2))
        self.o_proj = _linear(heads * head_width, width)

    def forward(self, x: Tensor, norm: nn.RMSNorm, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Compute causal attention over ``norm(x)``, without the output projection. Return the result [...,
        length, heads * head_width], and ``x`` for later uses of the stream. ``cos`` and ``sin`` [..., length,
        head_width]: the cosines and the sines of the rotation's angles. In each of the two, the right half of
        the columns equals the left half. Raises ValueError for another width."""
        q, k, v = self.q_proj.weight, self.k_proj.weight, self.v_proj.weight
        _check_autocast(q)
        if not cos.shape[-1] == sin.shape[-1] == self.head_width:
            raise ValueError(
                f"cos and sin have {cos.shape[-1]} and {sin.shape[-1]} columns; give them {self.head_width}, "
                "the two halves alike"
            )
        sizes = (len(q), len(k), len(v))
        weight = functional.packed(q, k, v, self.head_width)
        table = functional.angles(cos, sin, x.shape[:-1]).to(weight.dtype)
        parts, x = functional.before_attention_apart(
            sizes, x, _norm(norm), weight, table=table, turned=len(q) + len(k)
        )
        q, k, v = (t.view(*x.shape[:-1], -1, self.head_width).transpose(-3, -2) for t in parts)
        grouped = self.heads != self.kv_heads
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return attended.transpose(-3, -2).flatten(-2), x


class DecoderLayer(nn.Module):
    """A decoder layer: one program before PyTorch's attention, and one program after it (in fp16, two). By
    default, ``kv_heads`` is ``heads``, and ``head_width`` is ``width / heads``."""

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_width: int | None = None,
        activation: str = "swiglu",
        eps: float = 1e-6,
    ):
        super().__init__()
        if heads <= 0 or (head_width is None and width % heads):
            raise ValueError(f"width {width} is no multiple of {heads} heads: pass head_width")
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        kv_heads = heads if kv_heads is None else kv_heads
        head_width = width // heads if head_width is None else head_width
        self.self_attn = Attention(width, heads, kv_heads, head_width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = MLP(width, hidden, activation)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the stream after this layer. ``cos`` and ``sin`` are as in ``Attention``."""
        a, x = self.self_attn(x, self.input_layernorm, cos, sin)
        norm, mlp = _norm(self.post_attention_layernorm), self.mlp
        out, down = self.self_attn.o_proj.weight, mlp.down_proj.weight
        return functional.after_attention(a, x, norm, out, mlp.up, down, mlp.activation)


class CausalHead(nn.Module):
    """The last norm and the output projection [vocabulary, D] of a language model."""

    def __init__(self, width: int, vocabulary: int, eps: float = 1e-6):
        super().__init__()
        self.norm, self.lm_head = nn.RMSNorm(width, eps=eps), _linear(width, vocabulary)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy between the logits and ``target`` [..., length], a scalar in fp32. The
        logits are never stored. Rows whose target is -100 do not count."""
        _check_autocast(self.lm_head.weight)
        h = rms_norm(x, *_norm(self.norm))
        total = functional.summed_cross_entropy(h, self.lm_head.weight, target)
        return loss.mean(total, target)

    def logits(self, x: Tensor) -> Tensor:
        """Compute the logits [..., vocabulary] with PyTorch's matmul."""
        made: Tensor = self.lm_head(rms_norm(x, *_norm(self.norm)))
        return made
