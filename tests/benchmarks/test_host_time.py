"""The benchmark of host time, without a GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks import host_time


def test_every_kernel_is_measured_beside_a_matmul(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 8)
    host_time.main(["--json", "gemm_swiglu", "gemm_residual_rmsnorm_gemm_bwd"])
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["steps"] for row in kernels.values()] == [1, 2]
    for row in kernels.values():
        estimate, low, high = row["ratio"]
        assert 0 < row["mm"] < row["call"] < row["operator"] and low <= estimate <= high
