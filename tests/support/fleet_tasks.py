"""Pieces of the tests' own for slots on a cluster: what machines do to the work on them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from coda_agent.primitives.system.files import usable_cache, write_atomic
from coda_agent.verifier.gpu.worker import report


def kill_seat_once(marker: str) -> dict[str, Any]:
    """Kill the process of Ray's that holds this slot, the first time."""
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


def large(size: int) -> dict[str, Any]:
    return {"text": "x" * size}


def surroundings(_: object) -> dict[str, Any]:
    """The surroundings of a piece: its GPUs, secrets in its environment, its clock and its node."""
    return {
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "secrets": [name for name in os.environ if "KEY" in name or "TOKEN" in name],
        "clock": time.time(),
        "node": os.environ.get("TEST_NODE", ""),
    }
