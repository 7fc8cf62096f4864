"""A tiny Hugging Face model of each family that ``fused.huggingface`` can patch, and helpers for tests of
these models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coda_agent.fused.programs import NAMES
from coda_agent.verifier.numerics import error_gate, limits

VOCABULARY = 64
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    "Qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma": {"num_key_value_heads": 1, "head_dim": 16},
}
SCALED = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
SCALED |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
# The gradients of these models have few values, and all values of a gradient share the rounding errors of the
# later layers. Shared errors change the slope of a gradient's regression on the truth. So the slope has the
# wider limit of ``FEW``.
LIMITS = replace(limits.USUAL, slope=limits.FEW.slope, shared=limits.UNROUNDED.shared)


def model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu", **more: Any
) -> Any:
    """Return a causal model of two layers in training mode. All weights are random, including norms and
    biases."""
    library = importlib.import_module(f"transformers.models.{family.lower()}")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
    random = torch.random.fork_rng()
    with random:
        torch.manual_seed(seed)
        config = getattr(library, f"{family}Config")(**sizes | FAMILIES[family] | more)
        made = getattr(library, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return made.to(device, dtype).train()


def tokens(rows: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, length), generator=random)


def trained(model: Any, ids: Tensor, **more: Any) -> dict[str, Tensor]:
    """Return the loss of one step, and every parameter's gradient by name."""
    model.zero_grad(set_to_none=True)
    loss = accumulated(model, ids, **more)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **gradients}


def accumulated(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """Return the loss of one step, and add the step's gradients to the parameters' gradients. One target has
    the value that the loss ignores."""
    ids = ids.to(next(model.parameters()).device)
    labels = ids.clone()
    labels[0, 3] = -100
    loss: Tensor = model(input_ids=ids, labels=labels, **more).loss
    loss.backward()
    return loss.detach()


def faults(found: dict[str, Tensor], exact: dict[str, Tensor], usual: dict[str, Tensor]) -> list[str]:
    """Return the error gate's reasons to reject ``found``, a loss and gradients. ``exact`` is the truth in
    fp64. ``usual`` is the yardstick, which the unpatched model computes in the dtype of ``found``."""
    assert found.keys() == exact.keys() == usual.keys()
    outputs = {n: SimpleNamespace(dtype=NAMES[t.dtype]) for n, t in usual.items()}
    spec: Any = SimpleNamespace(outputs=outputs, tolerance=None)
    judged = error_gate.compare(spec, found, exact, usual, LIMITS)
    return [each.reason for each in judged if not each.passed]


def own_operators(call: Callable[[], Any]) -> list[str]:
    """Return the names of the ``coda_agent`` operators that ``call`` runs."""
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "coda_agent":
                seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    return seen
