"""Tests of 16-bit models: fp16 keeps its range, and one 16-bit type may run under autocast in the other."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import small_models
import torch
from layer_parts import Where, loss_of
from small_models import FAMILIES, own_operators, tokens, trained
from torch import Tensor

from coda_agent import fused

STREAMS = {  # the embeddings' largest channel, and the norms' weight
    "usual": (None, 1.0),
    "large": (1000.0, 1.0),
    "massive": (20_000.0, 4.0),
    "tiny": (None, 0.003),
}


def streaming(family: str, stream: str, seed: int = 0) -> Any:
    channel, weight = STREAMS[stream]
    model = small_models.model(family, seed=seed)
    with torch.no_grad():
        if channel:
            model.model.embed_tokens.weight[:, 3] = channel / (32**0.5 if family == "Gemma" else 1)
        if stream == "tiny":
            model.model.embed_tokens.weight.mul_(0.01)
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(weight - (1.0 if family == "Gemma" else 0.0))
    return model


def step(model: Any, scale: float, autocast: torch.dtype | None) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    ids = tokens(3, 17).to(model.device)
    with torch.autocast(ids.device.type, autocast, enabled=autocast is not None):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    (loss * scale).backward()
    return {"loss": loss.detach()} | {n: p.grad.double() / scale for n, p in model.named_parameters()}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    # Rounding errors dominate the gradients of queries and keys, because every token attends alike.
    names = [n for n in exact if not any(part in n for part in ("q_proj", "k_proj", "q_norm", "k_norm"))]
    return {n: loss_of(found[n], exact[n]) for n in names}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp16 weights", "autocast"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_fp16_has_the_unpatched_models_range(
    family: str, stream: str, scale: float, autocast: bool, where: Where
) -> None:
    """In both, a gradient may be lost without a loss scale, but the patched model loses no more."""
    usual, patched = dict[str, float](), dict[str, float]()
    how = torch.float16 if autocast else None
    for seed in range(4):
        model = streaming(family, stream, seed).to(where.device)
        exact = step(copy.deepcopy(model).double(), 1.0, None)
        model = model if autocast else model.half()
        for sums, fuses in ((usual, False), (patched, True)):
            if fuses:
                fused.patch(model)
            for name, error in errors(step(model, scale, how), exact).items():
                sums[name] = sums.get(name, 0.0) + error**2
    assert own_operators(partial(step, model, scale, how))
    # a gradient whose mean error is over a half, or nan, is lost in the unpatched model too
    there = [name for name in usual if usual[name] < 4 * 0.5**2]
    assert "loss" in there and len(there) > 4
    assert {name: patched[name] for name in there if not patched[name] < 1.5**2 * usual[name] + 4e-5} == {}


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_an_fp16_loss_keeps_gradients_of_tiny_streams(scale: float, where: Where) -> None:
    from coda_agent.fused import functional

    random = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 32, generator=random).to(where.device) for n in (24, 64))
    h, target = h * 1e-3, torch.randint(0, 64, (24,), generator=random).to(where.device)

    def gradients(loss: Any, dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(torch.float16).to(dtype).requires_grad_() for t in (h, w)]
        (loss(*given, target) * scale / 24).backward()
        return [grad.double() / scale for t in given if (grad := t.grad) is not None]

    def plain(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = h @ w.mT
        return torch.nn.functional.cross_entropy(
            logits.float() if h.dtype == torch.float16 else logits, target, reduction="sum"
        )

    exact, usual = gradients(plain, torch.float64), gradients(plain, torch.float16)
    patched = gradients(functional.summed_cross_entropy, torch.float16)
    for ours, theirs, truth in zip(patched, usual, exact, strict=True):
        assert loss_of(ours, truth) < 1.5 * loss_of(theirs, truth)


@pytest.mark.parametrize(
    ("weights", "autocast"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_16_bit_type_trains_under_autocast_in_the_other(
    family: str, weights: torch.dtype, autocast: torch.dtype, where: Where
) -> None:
    model = small_models.model(family, weights, device=where.device)
    exact = step(copy.deepcopy(model).double(), 1.0, None)
    usual = errors(step(model, 1.0, autocast), exact)
    fused.patch(model)
    patched = errors(step(model, 1.0, autocast), exact)
    assert own_operators(lambda: step(model, 1.0, autocast))
    assert all(patched[n] < 1.5 * usual[n] + 4e-3 for n in usual)
    assert all(p.grad.dtype == weights for p in model.parameters())
    assert trained(model, tokens()).keys() >= {"loss"}
