"""Count the bytes that a decoder layer keeps for its backward: ``python -m benchmarks.models.memory``.

The benchmark counts the bytes that autograd stores for one Llama layer in bf16, first as Hugging Face
computes the layer, then patched by ``fused``. The layer runs on the meta device, so no GPU is needed and
nothing is computed. Weights are not counted, because they stay in memory anyway. Attention stores the same
tensors as flash attention: q, k, v, the output, and one log-sum-exp per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coda_agent import fused
from coda_agent.primitives.system.markdown_table import markdown_table

SEQUENCES, LENGTH = 8, 2048


class Sizes(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


MODELS = {
    "1B": Sizes(2048, 8192, 32, 8),
    "8B": Sizes(4096, 14336, 32, 8),
    "70B": Sizes(8192, 28672, 64, 8),
}


class _Attention(torch.autograd.Function):
    """A stand-in that stores the same tensors as flash attention. Its backward never runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)


def kept(model: Any) -> float:
    """The bytes per token that the first layer of a causal model stores for its backward. The model is on the
    meta device."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in own:
            found[storage] = tensor  # keep a reference, so that no other storage gets this storage's address
        return tensor

    shape = (SEQUENCES, LENGTH, model.config.hidden_size)
    x = torch.zeros(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    turn = model.model.rotary_emb(x, torch.zeros(1, LENGTH, dtype=torch.int64, device="meta"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.model.layers[0](x, position_embeddings=turn)
    return sum(t.untyped_storage().nbytes() for t in found.values()) / (SEQUENCES * LENGTH)


def both(sizes: Sizes) -> tuple[float, float]:
    """The bytes per token of the unpatched and of the patched model."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
        return _Attention.apply(q, k, v), None

    ALL_ATTENTION_FUNCTIONS.register("counted", attend)
    config = LlamaConfig(num_hidden_layers=1, **sizes._asdict())
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation("counted")
    model.to(torch.bfloat16)
    plain = kept(model)
    assert fused.patch(model).fused
    return plain, kept(model)


def table() -> str:
    rows = []
    for name, sizes in MODELS.items():
        plain, ours = both(sizes)
        rows.append((name, f"{plain / 1024:.1f}", f"{ours / 1024:.1f}", f"{ours / plain:.2f}"))
    return markdown_table(
        ("widths of", "Hugging Face, KiB per token", "patched, KiB per token", "ratio"), rows
    )


if __name__ == "__main__":
    print(table())
