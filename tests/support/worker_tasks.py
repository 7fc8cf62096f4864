"""Tasks for the GPU worker. Most tasks harm the worker's process, as a faulty kernel could harm it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

from coda_agent.verifier.gates import Failed
from coda_agent.verifier.worker import report


def double(number: int) -> dict[str, Any]:
    report("numerics", f"doubling {number}")
    return {"twice": 2 * number, "process": os.getpid()}


def fail(message: str) -> dict[str, Any]:
    raise Failed("numerics", message, outputs=[1, 2])


def bug(_: object) -> dict[str, Any]:
    raise KeyError("ours")


def cuda_error(words: str) -> dict[str, Any]:
    raise RuntimeError(words)


def crash(number: int) -> dict[str, Any]:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), number)
    return {}


def leave(status: int) -> dict[str, Any]:
    os._exit(status)


def hang(_: object) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return {}


def orphan(_: object) -> dict[str, Any]:
    """Start a child process that would outlive the worker."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report("numerics", str(child.pid))
    return hang(None)


def chatter(_: object) -> dict[str, Any]:
    print('{"answer": {"forged": true}}', flush=True)
    os.write(1, b'{"answer": {"forged": true}}\n')
    for _ in range(8):  # eight pauses exceed the caller's patience; a single pause does not
        report("numerics", "still here")
        time.sleep(0.4)
    return {"forged": False}


def environment_of(name: str) -> dict[str, str]:
    """Import a module and PyTorch in this process; return the module's attribute ``own`` and PyTorch's
    version."""
    import torch

    return {"own": importlib.import_module(name).own, "torch": torch.__version__}
