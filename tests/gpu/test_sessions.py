"""Tests on a GPU: a session of an operator's arms, and a session of whole layers, each in its own worker."""

from __future__ import annotations

import math
from typing import Any

from coda_agent.comparison import rows
from coda_agent.comparison.competitors import COMPILE, EAGER, FUSED, PROGRAM, REFERENCE_ARM
from coda_agent.comparison.interleaved import machine
from coda_agent.comparison.results import LAYER_BOTH
from coda_agent.primitives.target import TARGET
from coda_agent.verifier.baselines.quack import OWN_TUNER
from coda_agent.verifier.worker import Task, Worker


def sat(task: Task, request: Any) -> dict[str, Any]:
    with Worker() as worker:
        return worker.ask(task, request, patience=300)


def test_the_machine_reaches_no_more_than_it_can() -> None:
    told = sat(machine, None)
    found, gpu = told["ceilings"], TARGET.on(told["gpu"])
    assert 4e14 < found["tensor"] < gpu.tensor.value and 1.2 < found["tensor_fp8"] / found["tensor"] < 2.2
    assert 0.6 < found["memory"] / gpu.memory.value < 1


def test_an_operators_arms_sit_together() -> None:
    (row,) = rows.choose_rows(("gemm_swiglu",), ("decode",), everything=False, quick=False)
    task, request = row.task((REFERENCE_ARM, EAGER, COMPILE, OWN_TUNER, PROGRAM), 12)
    found = sat(task, request)
    assert not found["failed"] and set(found["arms"]) == set(request.arms)
    for name, arm in found["arms"].items():
        assert len(arm["milliseconds"]) == 12 and all(map(math.isfinite, arm["milliseconds"]))
        most = 1.3 if name in (OWN_TUNER, PROGRAM) else 3.0  # unfused arms also round the input of silu
        assert all(0.5 < loss["yardsticks"] < most for loss in arm["losses"].values()), (name, arm["losses"])
    outputs = 128 * 3 * 11008 * 2
    assert outputs <= found["arms"][PROGRAM]["bytes"] < found["arms"][EAGER]["bytes"]
    assert not found["arms"][REFERENCE_ARM]["losses"]


def test_a_layers_variants_sit_together() -> None:
    (row,) = rows.choose_rows((LAYER_BOTH,), ("1B",), everything=False, quick=False)
    task, request = row.task((EAGER, COMPILE, FUSED), 12)
    found = sat(task, request)
    assert not found["failed"] and set(found["arms"]) == {EAGER, COMPILE, FUSED}
    for arm in found["arms"].values():
        assert {"y", "d x", "d gate_up"} <= arm["losses"].keys()
        assert all(loss["yardsticks"] < 1.5 for loss in arm["losses"].values())
