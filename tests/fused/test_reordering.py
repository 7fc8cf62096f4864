"""Tests of reordered weights. The backward that a GPU uses returns the gradients of autograd, and a training
step may keep the reordered weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import small_models
import torch
from small_models import tokens, trained
from torch import Tensor

from coda_agent import fused
from coda_agent.fused import reordering
from coda_agent.fused.huggingface import layers

WIDTH = 8
CASES: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
    "paired": (reordering.paired, [24, 24]),
    "packed, rotated": (partial(reordering.packed, width=WIDTH), [3 * WIDTH, WIDTH, WIDTH]),
    "packed": (reordering.packed, [3 * WIDTH, WIDTH, WIDTH]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_pass_of_a_gpu_equals_autograd(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The reordered weight and the gradients equal, bit for bit, those that the CPU's code computes. The
    weight and the gradients must be contiguous, because autograd would copy strided gradients."""
    function, rows = CASES[name]
    torch.manual_seed(0)
    parts = [torch.randn(each, 16).requires_grad_() for each in rows]

    def run() -> tuple[Tensor, ...]:
        made = function(*parts)
        return made, *torch.autograd.grad(made, parts, torch.arange(made.numel()).view_as(made).float())

    usual = run()
    monkeypatch.setattr(reordering, "runs_on_gpu", lambda _: True)
    for found, expected in zip(run(), usual, strict=True):
        assert torch.equal(found, expected) and found.is_contiguous()


@pytest.mark.parametrize(
    ("keeps", "recomputes", "times"), [(False, False, 8), (True, False, 4), (True, True, 12)]
)
def test_a_step_may_keep_reordered_weights_for_its_backward(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, recomputes: bool, times: int
) -> None:
    """Each of the two layers has two reordered weights. With checkpointing, ``keeps`` has no effect: weights
    are reordered in the forward, in the repeated forward, and in the backward."""
    model, made = small_models.model("Llama"), list[str]()
    fused.patch(model)
    plain = trained(model, tokens(), use_cache=False)

    def counted(own: Callable[..., Tensor], *given: Any, **more: Any) -> Tensor:
        made.append(own.__name__)
        return own(*given, **more)

    for own in (layers._packed, layers._paired):
        monkeypatch.setattr(layers, own.__name__, partial(counted, own))
    fused.patch(model, keep_reordered=keeps)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = trained(model, tokens(), use_cache=False)
    assert len(made) == times
    assert all(torch.equal(found[name], plain[name]) for name in plain)
