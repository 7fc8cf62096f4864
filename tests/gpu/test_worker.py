"""Tests on an H100: if a worker is lost, the error states the cause, and the GPU still computes."""

from __future__ import annotations

import os
from pathlib import Path

import faults
import pytest
from checkout import PYTHONPATH

from coda_agent.verifier.gpu.checks import clean
from coda_agent.verifier.worker import Lost, Worker


@pytest.mark.parametrize(
    ("fault", "code", "patience"),
    [
        (faults.illegal_address, "illegal_address", 60.0),
        (faults.assertion, "device_error", 60.0),
        (faults.out_of_memory, "out_of_memory", 60.0),
        (faults.hang, "hung", 8.0),
    ],
)
def test_what_a_kernel_does_to_the_gpu_is_named_and_over(monkeypatch, fault, code, patience):
    paths = [PYTHONPATH, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with Worker() as before:
        free = before.ask(clean, None, patience=60.0)["free_bytes"]
    with Worker() as worker:
        worker.ask(clean, None, patience=60.0)
        with pytest.raises(Lost) as lost:
            worker.ask(fault, None, patience=patience)
        assert lost.value.code == code, lost.value.message
    with Worker() as after:
        assert after.ask(clean, None, patience=60.0)["free_bytes"] >= free - (64 << 20)
