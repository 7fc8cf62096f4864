"""Tests of the benchmark of a layer's memory: its table is in docs/fused.md, and a patched layer keeps less
memory than the plain layer."""

from __future__ import annotations

from checkout import ROOT

from benchmarks.models import memory


def test_the_page_has_what_is_counted() -> None:
    assert memory.table().strip() in (ROOT / "docs" / "fused.md").read_text(encoding="utf-8")


def test_a_patched_layer_keeps_less() -> None:
    plain, ours = memory.both(memory.MODELS["8B"])
    assert ours < 0.65 * plain
