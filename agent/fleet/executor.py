"""The interface of an executor, which provides slots. A slot is a core or a GPU, on this or another machine.
Slots run pieces of work.

``local`` is the executor for this machine, and ``on_ray`` is the executor for a Ray cluster. The pool and the
driver work with any executor.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from coda_agent.primitives.errors import Absent
from coda_agent.primitives.system import subprocesses
from coda_agent.primitives.system.files import ROOT
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.gpu.visible import Gpu, visible_gpus
from coda_agent.verifier.worker import Task, Worker

CPU = "CPU"  # the kind of a slot without a GPU; a GPU slot's kind is the GPU's name
PACKAGES = ("agent", "comparison", "fused", "primitives", "verifier")  # all that a slot may run
AHEAD = {  # modules that a slot's worker imports early; the key is True for a slot without a GPU
    True: ("coda_agent.agent.fleet.pieces", "coda_agent.verifier.verify", "torch"),
    False: ("coda_agent.agent.fleet.pieces", "coda_agent.agent.artifacts.bundle"),
}


class SlotLost(Exception):
    """A slot is lost, because its process, node or cluster is gone. The slot's work need not be to blame."""


class ExecutorLost(Absent):
    """All slots are lost, for example because the cluster's head is gone."""


class Slot(Protocol):
    """A core or a GPU that runs one piece of work at a time. ``name`` is unique in the fleet; the name of a
    GPU is its UUID."""

    name: str
    kind: str
    node: str

    def run(self, task: Task, argument: Any, *, patience: float, progress: Progress) -> dict[str, Any]:
        """Run a task and return its answer, like ``verifier.worker.Worker.ask``. Raises SlotLost if the
        slot is lost."""
        ...

    def close(self) -> None:
        """End the slot's process, and with it the work that the slot runs."""
        ...


class Executor(Protocol):
    """Provides slots. Nodes may join and leave at any time, with their slots."""

    def slots(self) -> Sequence[Slot]:
        """The slots that exist now. Raises ExecutorLost."""
        ...

    def refused(self) -> Mapping[str, str]:
        """The nodes that may not join, each with the reason."""
        ...

    def close(self) -> None: ...


class ProcessSlot:
    """A slot of this machine. The slot runs its work in a separate process. If the process dies, a new
    process replaces it.

    The process gets no API keys, because the work may compile untrusted code. A slot without a GPU sees no
    GPU.
    """

    def __init__(self, name: str, node: str, gpu: Gpu | None = None):
        self.name, self.node = name, node
        self.kind = gpu.name if gpu else CPU
        self._gpu = gpu
        self._worker: Worker | None = None

    def run(self, task: Task, argument: Any, *, patience: float, progress: Progress) -> dict[str, Any]:
        worker = self._worker
        if worker is None or not worker.alive:
            worker = self._worker = self._started()
        try:
            return worker.ask(task, argument, patience=patience, progress=progress)
        except BaseException:
            worker.close()
            raise

    def _started(self) -> Worker:
        env = subprocesses.environment() | {"CUDA_VISIBLE_DEVICES": self._gpu.uuid if self._gpu else ""}
        if not self._gpu:  # each core has its own slot, so more PyTorch threads per slot would only compete
            env["OMP_NUM_THREADS"] = "1"
        return Worker(env=env, ahead=AHEAD[self._gpu is None])

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def usable_gpus() -> list[Gpu]:
    """The GPUs visible to this process that can run lowered kernels: those with ``TARGET``'s capability."""
    from coda_agent.primitives.target import TARGET

    return [gpu for gpu in visible_gpus() if gpu.capability == TARGET.capability]


def environment() -> dict[str, str]:
    """The versions that must be equal on all nodes of a fleet: Python, the packages, and a hash of this
    project's files."""
    from importlib.metadata import version

    from coda_agent.primitives.compiler.lower import PACKAGES

    packages = (*PACKAGES, "torch", "triton", "apache-tvm-ffi", "numpy")
    python = ".".join(map(str, sys.version_info[:3]))
    return {name: version(name) for name in packages} | {"python": python, "coda-agent": _own_hash()}


@cache
def _own_hash() -> str:
    """The hash of this project's Python files. In tests, ``CODA_AGENT_VERSION`` replaces the hash."""
    if given := os.environ.get("CODA_AGENT_VERSION"):
        return given
    hashed = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            hashed.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def differing(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """A message that lists the versions in which two nodes differ; "" if all versions are equal."""
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    words = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here" for name in names
    ]
    return "; ".join(words)
