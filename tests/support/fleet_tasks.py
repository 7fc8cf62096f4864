"""Pieces of work that tests run in the slots of a cluster. Some pieces disturb the machine that runs them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from coda_agent.agent.fleet.pieces import spec_of
from coda_agent.primitives.system.files import usable_cache, write_atomic
from coda_agent.verifier.worker import report


def kill_seat_once(marker: str) -> dict[str, Any]:
    """Kill the Ray process that holds this slot, but only on the first call. The file ``marker`` records this
    call."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return {"marker": marker}


def wait_for(path: str) -> dict[str, Any]:
    report("check", os.environ.get("TEST_NODE", ""))
    while not Path(path).exists():
        time.sleep(0.05)
    return {"node": os.environ.get("TEST_NODE", "")}


def fill_cache(size: int) -> dict[str, Any]:
    write_atomic(usable_cache() / "filled", b"0" * size)
    return {"node": os.environ.get("TEST_NODE", "")}


def tune_toy(asked: dict[str, str]) -> dict[str, Any]:
    """Compile an accepted program with the probe schedules, as the tuner compiles its schedules. Return how
    many schedules were not compiled before, and the results of the compilation."""
    from coda_agent.primitives.compiler.kernel_source import KernelSource
    from coda_agent.primitives.compiler.probe_schedules import PROBES
    from coda_agent.primitives.lang.ir import Program
    from coda_agent.primitives.runtime.precompile import compile_all, to_compile

    kernel = KernelSource(Program.from_json(asked["program"], spec_of(asked["spec"]).signature()))
    wanted = [(0, schedule) for schedule in PROBES]
    new = len(to_compile(kernel, {}, wanted))
    return {"compiled": new, "right": compile_all(kernel, {}, wanted), "node": os.environ["TEST_NODE"]}


def large(size: int) -> dict[str, Any]:
    return {"text": "x" * size}


def surroundings(_: object) -> dict[str, Any]:
    """Return the GPUs that a piece of work may use, the names of secrets in its environment, its clock's time
    and its node."""
    return {
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "secrets": [name for name in os.environ if "KEY" in name or "TOKEN" in name],
        "clock": time.time(),
        "node": os.environ.get("TEST_NODE", ""),
    }
