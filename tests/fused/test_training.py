"""Tests of training patched models: convergence, mixed precision, accumulation, compilation, the Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import torch._dynamo
from layer_parts import CPU, Counted, Where, loss_of
from small_models import FAMILIES, accumulated, faults, tokens, trained
from torch import Tensor

from coda_agent import fused

pytestmark = pytest.mark.slow
STEPS = 100
# After training in bf16, a parameter differs from the parameter of an fp32 model. In the patched model, this
# difference may be at most FARTHER times as large as in the unpatched model.
FARTHER = 1.5
TEXT = "a quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 4


def windows(rows: int, length: int, step: int) -> Tensor:
    """Return windows of the text. Each character is a token."""
    known = {character: i + 1 for i, character in enumerate(sorted(set(TEXT)))}
    whole = torch.tensor([known[c] for c in TEXT])
    first = [(step * rows + row) * 7 % (len(TEXT) - length) for row in range(rows)]
    return torch.stack([whole[f : f + length] for f in first])


def losses(model: Any) -> list[float]:
    """Train with AdamW; return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    found = []
    for step in range(STEPS):
        found.append(float(trained(model, windows(4, 16, step), use_cache=False)["loss"]))
        optimizer.step()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_it_converges_as_the_unpatched_model(family: str, where: Where) -> None:
    model = small_models.model(family, torch.bfloat16, device=where.device)
    patched, exact = copy.deepcopy(model), copy.deepcopy(model).float()
    fused.patch(patched)
    usual, found = losses(model), losses(patched)
    losses(exact)
    assert usual[-1] < 0.4 * usual[0]
    for step, (mine, theirs) in enumerate(zip(found, usual, strict=True)):
        assert abs(mine - theirs) < max(1e-2, 5e-2 * theirs), step
    trio = zip(patched.named_parameters(), model.parameters(), exact.parameters(), strict=True)
    for (name, mine), theirs, true in trio:
        mine, theirs, true = mine.detach(), theirs.detach(), true.detach()
        assert loss_of(mine, true) < FARTHER * loss_of(theirs, true), name


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma"])
def test_autocast_keeps_the_stream_and_the_gradients_in_fp32(family: str, where: Where) -> None:
    model, ids = small_models.model(family, device=where.device), tokens(4, 24).to(where.device)
    exact = trained(copy.deepcopy(model).double(), ids)
    patched = copy.deepcopy(model)
    assert fused.patch(patched).fused
    with torch.autocast(where.device, torch.bfloat16):
        usual, found = trained(model, ids), trained(patched, ids)
        assert patched.model(ids).last_hidden_state.dtype == torch.float32
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert faults(found, exact, usual) == []


def test_gradients_of_16_bit_weights_accumulate_into_fp32_buffers() -> None:
    model = small_models.model("Llama", torch.bfloat16)
    parts = [tokens(2, 12, seed) for seed in range(4)]
    fused.patch(model)
    each = [trained(model, ids) for ids in parts]
    buffers = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}

    def add(name: str) -> Any:
        def into(parameter: Any) -> None:
            buffers[name] += parameter.grad
            parameter.grad = None

        return into

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(add(name))
    model.zero_grad(set_to_none=True)
    for ids in parts:
        accumulated(model, ids)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, torch.stack([found[name].float() for found in each]).sum(0)), name


def test_gradients_of_fp32_weights_accumulate_under_autocast() -> None:
    model = small_models.model("Llama")
    fused.patch(model)
    parts = [tokens(2, 12, seed) for seed in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        each = [trained(model, ids) for ids in parts]
        model.zero_grad(set_to_none=True)
        for ids in parts:
            accumulated(model, ids)
    for name, parameter in model.named_parameters():
        assert loss_of(parameter.grad, torch.stack([found[name] for found in each]).sum(0)) < 1e-6, name


@pytest.mark.parametrize("stack", [False, True])
def test_a_model_compiles_whole_for_any_length(stack: bool, where: Where) -> None:
    """On a CPU the backend is not Inductor, because compiling Inductor's C++ takes half a minute.
    test_functional covers Inductor on a CPU."""
    backend = "aot_eager" if where is CPU else "inductor"
    model = small_models.model("Llama", where.dtype, device=where.device, num_hidden_layers=1 + stack)
    plain = copy.deepcopy(model)
    fused.patch(model, stack=stack)
    torch._dynamo.reset()
    counted = Counted(backend)
    model.compile(backend=counted, fullgraph=True)
    for length in (8, 12, 20):
        ids = tokens(2, length)
        found, usual = (trained(each, ids, use_cache=False) for each in (model, plain))
        assert max(loss_of(found[name], usual[name]) for name in usual) < 10 * where.close
    assert counted.graphs == 2  # one graph for the first length, one for any other length


def test_a_compiled_model_follows_patch_and_unpatch() -> None:
    model, graphs = small_models.model("Llama", num_hidden_layers=1).eval(), list[int]()

    def count(graph: Any, _: Any) -> Any:
        graphs.append(sum("coda_agent" in str(node.target) for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    model.compile(backend=count, fullgraph=True)
    with torch.no_grad():
        for change in (fused.patch, fused.unpatch, fused.patch):
            change(model)
            model(input_ids=tokens(), use_cache=False)
    assert graphs == [2, 0, 2]


def logged(model: Any, folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    rows: Any = [{"input_ids": ids, "labels": ids} for ids in windows(32, 16, 0)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert trainer.evaluate(rows[:4])["eval_loss"] < trainer.state.log_history[0]["loss"]
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_trains_it(tmp_path: Path) -> None:
    model = small_models.model("Llama")
    patched = copy.deepcopy(model)
    fused.patch(patched)
    usual, found = logged(model, tmp_path / "usual"), logged(patched, tmp_path / "patched")
    assert len(found) == 6 and found[-1] < found[0]
    assert found == pytest.approx(usual, abs=2e-4)
    again = type(model).from_pretrained(next((tmp_path / "patched").glob("checkpoint-*")))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), patched.parameters(), strict=True))
