"""Tests of the benchmark of host time, without a GPU. The tests replace the benchmark's clock, so that
results do not depend on the machine's load."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import host_time
from coda_agent.primitives.runtime.executable import Plan


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the benchmark's clock by a count of the calls of Python functions and builtins."""
    made = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    monkeypatch.setattr(host_time, "time", SimpleNamespace(thread_time=lambda: made))
    before = sys.getprofile()
    sys.setprofile(count)
    yield
    sys.setprofile(before)


@pytest.mark.usefixtures("counted")
def test_every_kernel_is_measured_beside_a_matmul(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 8)
    host_time.main(["--json", "gemm_swiglu", "gemm_residual_rmsnorm_gemm_bwd"])
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["steps"] for row in kernels.values()] == [1, 2]
    for row in kernels.values():
        estimate, low, high = row["ratio"]
        assert 0 < row["mm"] < row["call"] < row["operator"] and low <= estimate <= high


@pytest.mark.usefixtures("counted")
def test_a_case_is_measured_at_its_own_sizes(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 8)
    built, usual = list[Any](), Plan.__init__

    def noted(plan: Plan, *given: Any) -> None:
        built.append(given[1])
        usual(plan, *given)

    monkeypatch.setattr(Plan, "__init__", noted)
    host_time.main(["--json", "--case", "decode", "gemm_row_abs_max"])
    (row,) = json.loads(capsys.readouterr().out)["kernels"].values()
    assert 0 < row["mm"] < row["call"]
    assert built and all(sizes == {"M": 128, "K": 4096, "N": 4096} for sizes in built)
    with pytest.raises(SystemExit, match="gemm_row_abs_max: no case 1b was measured"):
        host_time.main(["--case", "1b", "gemm_row_abs_max"])


@pytest.mark.usefixtures("counted")
def test_a_chain_is_measured_with_and_without_autograd(
    capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 8)
    host_time.main(["--json", "mlp_swiglu", "loss"])
    found = json.loads(capsys.readouterr().out)
    assert not found["kernels"] and [*found["chains"]] == ["mlp_swiglu", "loss"]
    for row in found["chains"].values():
        assert 0 < row["mm"] <= row["mm_training"] < row["launcher"] < row["inference"] < row["training"]
        assert row["training_more"] > row["inference_more"] > 0
