"""The models and arms of the training benchmark."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coda_agent import fused

PLAIN, COMPILED, LIGER, FUSED, BOTH = (
    "transformers",
    "torch.compile",
    "Liger",
    "fused",
    "fused, torch.compile",
)
STACK, STACK_COMPILED = f"{FUSED}, whole stack", f"{FUSED}, whole stack, torch.compile"
AGAIN = ", recompute"
# in the order in which they are prepared, the most important first
ARMS = (COMPILED, BOTH, STACK_COMPILED, PLAIN, FUSED, STACK, LIGER, PLAIN + AGAIN, FUSED + AGAIN)
THEIRS = (PLAIN, COMPILED, LIGER)
BATCH, LENGTH = 4, 4096
SHORT = 1024  # tokens per sequence while losses are compared
RATE = 1e-4
PACKAGES = ("torch", "transformers", "liger-kernel", "nvidia-cutlass-dsl", "quack-kernels")

Step = Callable[[Tensor], Tensor]  # from token ids to the loss


class LossArm(NamedTuple):
    """A way to compute the loss. ``rotary``: the rotation function that the model's Python module must
    contain while the arm runs."""

    loss: Step
    rotary: Any


def model(kind: str, **changed: Any) -> Any:
    """A causal language model with about 1B random parameters in bf16. The model is a Llama with the sizes of
    Llama 3.2 1B, or a Qwen3 of the same width."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 2048,
        "num_attention_heads": 32 if kind == "llama" else 16,
        "num_key_value_heads": 8,
        "head_dim": 64 if kind == "llama" else 128,
        "intermediate_size": 8192 if kind == "llama" else 6144,
        "num_hidden_layers": 16 if kind == "llama" else 20,
        "vocab_size": 128256 if kind == "llama" else 151936,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    config, made = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    return made(config(**sizes | changed)).to(torch.bfloat16).train()


def text(seed: int, sequences: int, length: int, vocabulary: int) -> Tensor:
    """Token ids [sequences, length]. Every second token is a function of the token before it, so that a model
    can learn."""
    most = min(512, vocabulary)
    ids = torch.randint(0, most, (sequences, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 1::2] = (ids[:, ::2] * 7 + 3) % most
    return ids


def sharing(source: nn.Module) -> Any:
    """A copy of a model that uses the original's parameters and buffers."""
    shared = [*source.parameters(), *source.buffers()]
    return copy.deepcopy(source, {id(t): t for t in shared})


def arm(name: str, source: nn.Module, kind: str) -> LossArm:
    """Create an arm that shares a model's parameters."""
    own, module = sharing(source), code(kind)
    rotary = module.apply_rotary_pos_emb
    if name == LIGER:
        from liger_kernel import transformers as liger

        apply = {"llama": liger.apply_liger_kernel_to_llama, "qwen3": liger.apply_liger_kernel_to_qwen3}[kind]
        usual = dict(vars(module))
        apply(model=own)  # Liger's patch also changes the Python module, for all models
        rotary = module.apply_rotary_pos_emb
        vars(module).update(usual)
    if name.startswith(FUSED):
        fused.patch(own, keep_reordered=True, stack=name in (STACK, STACK_COMPILED))
    if name.endswith(AGAIN):
        own.activation_checkpointing_enable()
    run = torch.compile(own) if name in (COMPILED, BOTH, STACK_COMPILED) else own
    return LossArm(lambda ids: run(input_ids=ids, labels=ids).loss, rotary)


def code(kind: str) -> Any:
    """The Python module of a kind of model."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    return {"llama": modeling_llama, "qwen3": modeling_qwen3}[kind]
