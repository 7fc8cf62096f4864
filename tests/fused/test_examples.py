"""Test of the programs in examples/, with a tiny model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

pytestmark = pytest.mark.slow
TINY = ["--steps", "40", "--batch", "4", "--length", "32", "--width", "64", "--layers", "1"]


def example(name: str) -> Any:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def test_a_llama_learns_a_text_and_continues_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = example("train")([str(ROOT / "LICENSE"), str(tmp_path), *TINY])
    assert losses[-1] < 0.8 * losses[0]
    assert "| fused | block_swiglu (derived) |" in capsys.readouterr().out
    torch.manual_seed(0)
    text = example("generate")([str(tmp_path), "the License", "--tokens", "20"])
    assert len(text) == 31 and text.startswith("the License")
    with pytest.raises(SystemExit):
        example("generate")([str(tmp_path), "ß"])
