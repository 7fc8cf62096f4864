"""Tests of reordered weights: no call reads an old one, and a frozen model reorders each weight once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import small_models
import torch
from layer_parts import Where, loss_of
from small_models import tokens, trained
from torch import Tensor

from coda_agent import fused
from coda_agent.fused.huggingface import layers


@pytest.fixture
def reordered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that reorder weights, one entry a call."""
    calls = list[str]()

    def counted(function: Callable[..., Tensor], *weights: Any, **how: Any) -> Tensor:
        calls.append(function.__name__)
        return function(*weights, **how)

    for function in (layers._packed, layers._paired):
        monkeypatch.setattr(layers, function.__name__, partial(counted, function))
    return calls


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model.eval()(tokens().to(model.device), use_cache=False).logits
    return result


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    trained(model.train(), tokens())
    optimizer.step()


def data_write(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def unnoticed_write(model: Any) -> None:
    autograd: Any = torch.autograd
    for parameter in model.parameters():
        with torch.no_grad(), autograd._unsafe_preserve_version_counter(parameter):
            parameter.mul_(1.5)


def swap(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def merged_adapter(model: Any) -> None:
    import peft

    parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    config = peft.LoraConfig(r=4, target_modules=parts, init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).merge_and_unload()


CHANGES = [fused_step, data_write, unnoticed_write, swap, merged_adapter]


@pytest.mark.parametrize("keep_reordered", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["never frozen", "frozen before"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_call_reads_old_weights(change: Callable[[Any], None], inside: bool, keep_reordered: bool) -> None:
    model = small_models.model("Llama")
    fused.patch(model, keep_reordered)
    with fused.frozen(model) if inside else nullcontext():
        before = logits(model)
    change(model)
    after = logits(model)
    assert loss_of(after, before) > 1e-2
    fused.unpatch(model)
    assert loss_of(after, logits(model)) < 3e-6


def test_a_frozen_model_reorders_each_weight_once(reordered: list[str], where: Where) -> None:
    model = small_models.model("Llama", where.dtype, device=where.device)
    fused.patch(model)
    usual = logits(model)
    assert len(reordered) == 4  # two layers with two reordered weights each
    with fused.frozen(model), fused.frozen(model.model):
        assert torch.equal(logits(model), usual) and torch.equal(logits(model), usual)
        assert len(reordered) == 8
        copied = copy.deepcopy(model)
        logits(copied)
        assert len(reordered) == 12  # a copy of the model is not frozen
    assert torch.equal(logits(model), usual) and len(reordered) == 16


def test_the_order_of_a_copy_is_that_of_the_call() -> None:
    """With a cache, queries and keys have the model's own order of columns; without one, another order."""
    model, ids = small_models.model("Llama").eval(), tokens()
    fused.patch(model)
    usual = logits(model)
    with fused.frozen(model), torch.inference_mode():
        for cache in (True, False, True):
            assert loss_of(model(ids, use_cache=cache).logits, usual) < 3e-6


def test_training_inside_is_refused_and_adapters_are_not() -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    with fused.frozen(model), pytest.raises(RuntimeError, match="train outside of it"):
        trained(model, tokens())
    trained(model, tokens())
    stream = torch.randn(1, 6, 32, requires_grad=True)
    model.requires_grad_(False)
    plain = torch.autograd.grad(model(inputs_embeds=stream, use_cache=False).logits.square().sum(), stream)
    with fused.frozen(model):
        for _ in range(2):
            inside = torch.autograd.grad(
                model(inputs_embeds=stream, use_cache=False).logits.square().sum(), stream
            )
            assert torch.equal(inside[0], plain[0])


@pytest.mark.parametrize("change", [swap, lambda m: m.load_state_dict(m.state_dict())], ids=["swap", "load"])
def test_a_change_inside_that_pytorch_notices_is_refused(change: Callable[[Any], Any]) -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    with fused.frozen(model):
        logits(model)
        change(model)
        with pytest.raises(RuntimeError, match="LlamaDecoderLayer changed inside the context"):
            logits(model)
    logits(model)


def test_a_sharded_model_keeps_no_copies(reordered: list[str]) -> None:
    distributed: Any = torch.distributed
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = small_models.model("Llama")
    fused.patch(model)
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        with fused.frozen(whole), torch.no_grad():
            for _ in range(2):
                whole(tokens(), use_cache=False)
    finally:
        distributed.destroy_process_group()
    assert len(reordered) == 8


@pytest.mark.parametrize("model", [None, "meta-llama/Llama-3.2-1B", torch.nn.Linear])
@pytest.mark.parametrize("call", [fused.patch, fused.unpatch], ids=["patch", "unpatch"])
def test_what_is_no_module_is_refused(call: Callable[[Any], Any], model: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, .* not "):
        call(model)
