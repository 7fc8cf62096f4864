"""The executor of one machine. Every core and every GPU is a slot, and each slot has its own process."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

from coda_agent.agent.fleet.executor import ProcessSlot, Slot, usable_gpus
from coda_agent.verifier.gpu.visible import Gpu


class Local:
    """The slots of this machine. ``cpus``: the number of cores to use, by default all cores that this process
    may use. ``gpus``: the GPUs to use, by default ``usable_gpus()``."""

    def __init__(self, cpus: int | None = None, gpus: Sequence[Gpu] | None = None):
        node = platform.node()
        if gpus is None:
            gpus = usable_gpus()
        names = [f"{node}/{n}" for n in range(len(os.sched_getaffinity(0)) if cpus is None else cpus)]
        self._slots = [ProcessSlot(name, node) for name in names]
        self._slots += [ProcessSlot(gpu.uuid, node, gpu) for gpu in gpus]

    def slots(self) -> Sequence[Slot]:
        return self._slots

    def refused(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
