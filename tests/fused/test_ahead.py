"""Tests of objects that are built ahead of time. The tests check which programs a patched model calls.
They also check that a call waits while another process compiles the object that the call needs."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import small_models
import torch
from small_models import FAMILIES, own_operators, tokens, trained
from torch import nn

from coda_agent import fused
from coda_agent.fused import ahead, ops
from coda_agent.primitives.compiler import jit
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.runtime.compile import compile_gemm


def on_meta(family: str) -> nn.Module:
    model: nn.Module = small_models.model(family, torch.bfloat16).to("meta")
    assert fused.patch(model).fused
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_calls_is_what_it_runs(family: str) -> None:
    real = small_models.model(family, torch.bfloat16)
    fused.patch(real)
    ran = own_operators(lambda: trained(real, tokens(2, 12), use_cache=False))
    found = ahead.called(ahead.training(on_meta(family), 2, 12))
    loss = ["loss_exponentials", "loss_stream_gradient", "loss_weight_gradient", "gemm_grad_accumulate"]
    assert "summed_loss" in ran
    names = sorted({re.sub("_backward.*", "_backward", n) for n in ran if n != "summed_loss"} | {*loss})
    assert sorted(bound.program.signature.name for bound in found) == names
    assert all(bound.sizes["M"] == 24 for bound in found)
    blocks = [b.program for b in found if b.program.signature.name.startswith("block")]
    wide = "fp32" if family == "Gemma" else "bf16"  # Gemma computes 1 + weight in fp32
    assert [block.signature.inputs["gamma"].dtype for block in blocks] == [wide, wide]


def test_inference_is_a_prompt_and_a_token() -> None:
    found = ahead.called(ahead.inference(on_meta("Llama"), 2, 12))
    assert [b.sizes["M"] for b in found] == [24, 24, 2, 2]


def test_a_call_waits_for_who_compiles_and_loads_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = ahead.Bound(ops.defined["gemm_swiglu"].program, {"M": 128, "D": 64, "F": 64})
    (built,) = ahead.build([bound])
    assert built.refused == []
    kernel = KernelSource(bound.program, built.schedules)
    (gemm,) = kernel.lowered.gemms
    given = kernel.lowered, gemm, built.schedules[0], bound.sizes
    import cutlass.cute
    from quack.cache.jit import FileLock

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cutlass.cute, "compile", never)
    (path,) = jit._objects(*given)
    whole = path.read_bytes()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(compile_gemm(*given)))
    with FileLock(path.with_suffix(".lock"), exclusive=True):
        path.unlink()
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and not found
        path.write_bytes(whole)
    waiting.join(20)
    assert len(found) == 1 and callable(found[0])
