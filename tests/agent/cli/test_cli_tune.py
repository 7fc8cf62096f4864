"""The commands ``tune`` and ``build``. Both take a kernel and the sizes of its dims, or a model's folder and
the sizes of its input. ``tune`` needs a GPU; ``build`` compiles without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import small_models
import torch
from checkout import ROOT
from commanding import Command

from coda_agent.agent import setup
from coda_agent.agent.cli import tune as cli_tune
from coda_agent.fused import schedules
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import tune

pytestmark = pytest.mark.usefixtures("runs_home", "plain", "nothing_beside")
KERNEL = ROOT / "generated_kernels" / "gemm_swiglu.program.json"


@pytest.mark.parametrize("sizes", ["M=8", "M=8,D=8,F=8,N=8", "M=8,D=8,F=", "M=8,D=8,F=0", "M=8,D=8,D=8", "8"])
def test_wrong_sizes_are_one_line_with_an_example(command: Command, sizes: str) -> None:
    done = command("tune", KERNEL, sizes)
    assert done.status == 2 and "M=4096,D=4096,F=4096" in done.err


def test_it_needs_a_gpu(command: Command, tmp_path: Path) -> None:
    small_models.model("Llama").config.save_pretrained(tmp_path)
    for done in (command("tune", KERNEL, "M=128,D=64,F=64"), command("tune", tmp_path, "2x12")):
        assert done.status == 3 and "or run build, which needs none" in done.err


def test_a_folder_that_is_no_models(command: Command, tmp_path: Path) -> None:
    for name in ("tune", "build"):
        done = command(name, tmp_path, "2x12")
        assert done.status == 2 and f"{tmp_path}: this folder has no config.json" in done.err


@pytest.mark.parametrize("config", ['{"model_type": "vit"}', '{"model_type": "new"}', "[]"])
def test_a_folder_of_no_language_model_is_one_line(command: Command, tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    done = command("build", tmp_path, "2x12")
    assert done.status == 2 and f"{tmp_path}: transformers cannot make a causal language model" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("place", ["a checkout", "elsewhere"])
def test_a_mistyped_kernel_is_one_line_with_its_name(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "elsewhere":
        monkeypatch.chdir(tmp_path)
    for name in ("tune", "build"):
        done = command(name, "gemm_swigluu", "M=128,D=64,F=64")
        assert done.status == 2 and "did you mean gemm_swiglu?" in done.err


@pytest.mark.parametrize(
    ("kernel", "sizes", "said"),
    [
        ("gemm_rope", "M=128,K=256,H=8,P=300", "gemm_rope: step 0: no tile holds whole heads of 600 columns"),
        ("gemm_swiglu", "M=128,D=257,F=512", "gemm_swiglu: .*rows of 257 bf16"),
    ],
)
def test_sizes_that_no_kernel_can_take_are_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, kernel: str, sizes: str, said: str
) -> None:
    monkeypatch.setattr(setup, "use_gpu", lambda wanted: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(cli_tune, "_drawn", lambda program, sizes: {})
    done = command("tune", kernel, sizes)
    assert done.status == 2 and re.search(said, done.err), done.err


def test_options_of_a_model_are_refused_for_a_kernel(command: Command) -> None:
    for name in ("tune", "build"):
        done = command(name, KERNEL, "M=128,D=64,F=64", "--training", "--stack")
        assert done.status == 2 and "--stack and --training would do nothing: it is for a model" in done.err


@pytest.mark.parametrize("sizes", ["8", "8x", "0x8", "8x2048x1", "M=8"])
def test_a_models_sizes_are_sequences_and_their_length(command: Command, tmp_path: Path, sizes: str) -> None:
    small_models.model("Llama").config.save_pretrained(tmp_path)
    for name in ("build", "tune"):
        done = command(name, tmp_path, sizes)
        assert done.status == 2 and "such as 8x2048" in done.err


def test_what_cannot_be_launched_is_not_built(command: Command) -> None:
    done = command("build", KERNEL, "M=128,D=60,F=64")
    assert done.status == 2 and "rows of 60 bf16 are not a multiple of 16 bytes" in done.err


@pytest.mark.slow
def test_a_built_kernel_is_ready(command: Command) -> None:
    done = command("build", KERNEL, "M=128,D=64,F=64", "M=8192,D=4096,F=11008")
    assert done.status == 0
    said = ["gemm_swiglu  M=128, D=64, F=64  ready", "gemm_swiglu  M=8192, D=4096, F=11008  ready"]
    assert done.out.splitlines() == said


def test_the_schedules_of_a_model_are_kept_by_program(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_models.model("Llama").config.save_pretrained(tmp_path)
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(setup, "use_gpu", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H")
    monkeypatch.setattr(cli_tune, "_drawn", lambda *_: {})
    monkeypatch.setattr(
        tune, "tuned_schedules", lambda source, *_: {g.step: Schedule() for g in source.lowered.gemms}
    )
    assert command("tune", tmp_path, "2x12").status == 0
    assert len(command("tune", tmp_path, "2x12", "--training").out.splitlines()) == 8
    rows = [row for row in schedules.known() if row.gpu == "H"]
    schedules.known.cache_clear()
    names = {"attention_in_rotated", "attention_in_rotated_backward", "block_swiglu", "block_swiglu_backward"}
    names |= {"loss_exponentials", "loss_stream_gradient", "loss_weight_gradient", "gemm_grad_accumulate"}
    assert {row.kernel for row in rows} == names
    assert all(row.shape[0] for row in rows)
