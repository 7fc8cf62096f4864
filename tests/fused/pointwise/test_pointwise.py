"""Tests of the pointwise part of a backward. torch.compile makes one graph of this part, without
graph breaks. ``fused`` compiles this part only for tensors on a GPU that nothing traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from layer_parts import PARTS, gradients

from coda_agent.fused import chains, functional
from coda_agent.fused.pointwise import programs


def test_a_head_compiles_whole_for_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    link, seen = functional.ATTENTION_IN[False, True], list[tuple[Any, ...]]()

    class Watched(programs.PointwiseProgram):
        def __call__(self, inputs: Any, sizes: Any) -> Any:
            found = super().__call__(inputs, sizes)
            seen.append((self, self.arguments(inputs, sizes), found))
            return found

    monkeypatch.setattr(chains, "PointwiseProgram", Watched)
    monkeypatch.setattr(link, "_heads", {})
    monkeypatch.setattr(link, "by_hand", {})
    for rows in (8, 16, 24, 40, 56):
        gradients(PARTS["before attention, rotated"].ours, PARTS["before attention, rotated"].drawn(rows))
    assert len({id(head) for head, *_ in seen}) == 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(seen[0][0].run, backend="aot_eager", fullgraph=True)
    for _, arguments, found in seen:
        assert all(torch.equal(a, b) for a, b in zip(compiled(*arguments), found.values(), strict=True))
    # one graph for the first number of rows, one for any other number
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_only_a_gpus_tensors_are_compiled_and_no_traced_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def compiled(function: Any) -> Any:
        def run(*given: Any) -> Any:
            calls.append("compiled")
            return function(*given)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    double = programs.fused_on_gpu(lambda t: t * 2)
    plain = torch.ones(3)
    assert torch.equal(double(plain), plain * 2) and calls == []
    with torch._subclasses.FakeTensorMode():
        double(torch.ones(3, device="cuda"))
    assert calls == []
