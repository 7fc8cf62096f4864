"""Tests of the benchmark of training, with a tiny model and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.models import training
from benchmarks.models.arms import AGAIN, FUSED, LIGER, PLAIN
from benchmarks.models.training_page import page

TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY |= {"intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 512}
EAGER = (PLAIN, FUSED, PLAIN + AGAIN, FUSED + AGAIN)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_each_arm_trains_the_same_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "ARMS", EAGER)
    monkeypatch.setattr(training, "STEPS", 4)
    monkeypatch.setattr(training, "SEEDS", 2)
    out, drawn = tmp_path / "found.json", tmp_path / "page.md"
    training.measure(kind, 600, out, "cpu", training.StepSizes(2, 32, 16), **TINY)
    found = json.loads(out.read_text())[kind]
    assert found["failed"] == {} and list(found["times"]) == list(EAGER)
    assert {len(each) for each in found["times"].values()} == {training.ROUNDS}
    both = [found["losses"][name] for name in (PLAIN, FUSED)]
    for plain, ours in zip(*both, strict=True):
        assert plain == pytest.approx(ours, abs=0.05) and len(set(plain)) == training.STEPS
    assert len({each[0] for each in both[0]}) == 2
    training.main(["draw", str(out), str(drawn)])
    assert all(f"| {kind} | {name} |" in drawn.read_text() for name in EAGER)


def test_an_arm_that_fails_or_has_no_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "ARMS", (PLAIN, LIGER))  # Liger fails without a GPU
    monkeypatch.setattr(training, "ROUNDS", 8)
    monkeypatch.setattr(training, "STEPS", 1)
    out = tmp_path / "found.json"
    training.measure("llama", 600, out, "cpu", training.StepSizes(1, 8, 8), **TINY)
    found = json.loads(out.read_text())
    assert list(found["llama"]["failed"]) == [LIGER]
    assert LIGER in page(found)
    with pytest.raises(ValueError, match="no arm"):
        training.measure("llama", 0, out, "cpu", training.StepSizes(1, 8, 8), **TINY)
