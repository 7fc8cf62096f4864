"""Tests of the memory for draws on which a program failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from authoring import TOY_KERNEL, TWICE, program_of, write_toy

from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import cpu_numerics, failed_draws
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.verify import check_program


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Spec, Program]:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    spec = load(write_toy(tmp_path))
    return spec, program_of(spec, TWICE)


def fail(toy: tuple[Spec, Program], seed: int, device: str = "cpu") -> None:
    draw = cpu_numerics.InputSettings({"M": 24, "K": 16, "N": 8}, "normal", seed)._asdict()
    with pytest.raises(Failed), failed_draws.remembered(*toy, device):
        raise Failed("numerics", "wrong", draw=draw)


def test_a_program_is_judged_again_on_the_draw_on_which_it_failed(
    toy: tuple[Spec, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = check_program(*toy)
    assert first is not None and first.code == "numerics"
    (draw,) = failed_draws.of(*toy)
    assert f"seed {draw.seed}" in first.message
    # the kindest draws of all: none
    monkeypatch.setattr(cpu_numerics, "runs", lambda *_: iter(()))
    again = check_program(*toy)
    assert again is not None and again.message == first.message


def test_the_latest_draws_are_kept_for_each_program_and_kind_of_device(toy: tuple[Spec, Program]) -> None:
    for seed in (*range(20), 7):
        fail(toy, seed)
    assert [draw.seed for draw in failed_draws.of(*toy)] == [7, *range(19, 7, -1), *range(6, 3, -1)]
    assert failed_draws.of(*toy, "cuda") == []
    fail(toy, 5, "cuda")
    assert [draw.seed for draw in failed_draws.of(*toy, "cuda")] == [5]
    assert failed_draws.of(toy[0], program_of(toy[0], TOY_KERNEL)) == []


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"sizes": 3}]', '[{"family": "normal"}]', "[" * 9999])
def test_a_damaged_file_is_no_verdict(toy: tuple[Spec, Program], content: str, tmp_path: Path) -> None:
    fail(toy, 1)
    (path,) = (tmp_path / "cache" / "failed_draws").iterdir()
    path.write_text(content)
    assert failed_draws.of(*toy) == []


def test_a_draw_of_a_family_that_is_gone_does_not_count(toy: tuple[Spec, Program], tmp_path: Path) -> None:
    fail(toy, 1)
    (path,) = (tmp_path / "cache" / "failed_draws").iterdir()
    path.write_text(path.read_text().replace("normal", "gone"))
    assert failed_draws.of(*toy) == []


def test_a_verdict_counts_if_the_cache_cannot_be_written(toy: tuple[Spec, Program], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the folder's place")
    fail(toy, 1)
