"""Tests of the benchmark of decoding, with a tiny model and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models import arms, serving

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 512}


def test_a_decoder_computes_what_the_model_does() -> None:
    model = arms.model("llama", **TINY).float().eval()
    decoder = serving.Decoder(model, model.config, 2, "cpu")
    prompt = torch.randint(0, 512, (2, serving.PROMPT))
    with torch.no_grad():
        filled: Any = model(prompt, use_cache=True).cache
        for ours, theirs in zip(decoder.cache.layers, filled.layers, strict=True):
            more = torch.zeros(2, 2, serving.TOKENS, 16)
            ours.keys, ours.values = (torch.cat((t, more), 2) for t in (theirs.keys, theirs.values))
        usual, ids = [], decoder.first
        for _ in range(3):
            prompt = torch.cat((prompt, ids), 1)
            ids = model(prompt).logits[:, -1].argmax(-1, keepdim=True)
            decoder.step()
            usual.append(torch.equal(decoder.tokens, ids))
    assert all(usual)


def test_a_replay_s_own_logits_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(step: Any) -> Any:
        """Return a fake graph. Its replay runs the step, then overwrites the step's logits with zeros."""
        return lambda: (step(), step.__self__.last.zero_())

    monkeypatch.setattr(serving, "ARMS", (serving.FUSED, serving.FUSED + serving.GRAPH))
    monkeypatch.setattr(serving, "_recorded", recorded)
    out = tmp_path / "found.json"
    serving.measure("llama", 600, out, "cpu", (1,), **TINY)
    times = json.loads(out.read_text())["llama"]["batches"]["1"]
    why = "ValueError: its logits are 1.000 from the model's"
    assert times["failed"] == {serving.FUSED + serving.GRAPH: why}


def test_each_arm_is_timed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = (serving.PLAIN, serving.FUSED)
    # the last arm fails, because a graph needs a GPU
    monkeypatch.setattr(serving, "ARMS", (*arms, serving.FUSED + serving.GRAPH))
    out, page = tmp_path / "found.json", tmp_path / "page.md"
    serving.measure("qwen3", 600, out, "cpu", (1, 3), **TINY)
    for times in json.loads(out.read_text())["qwen3"]["batches"].values():
        assert list(times["failed"]) == [serving.FUSED + serving.GRAPH]
        for name in arms:
            assert len(times["token"][name]) == len(times["host"][name]) == serving.ROUNDS
            assert times["apart"][name] < 0.02
    serving.main(["draw", str(out), str(page)])
    assert all(f"| qwen3 | 3 | {name} |" in page.read_text() for name in arms)
