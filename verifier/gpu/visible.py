"""The GPUs that this process may use. NVML lists them, because asking CUDA would leave a CUDA context in this
process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's driver on Linux, and under Windows (WSL)


def usable() -> bool:
    """Whether this process can use a GPU through PyTorch. Without a driver, PyTorch is not imported, because
    its import takes seconds."""
    if not any(map(os.path.exists, DEVICES)):
        return False
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True)
class Gpu:
    """A GPU: its UUID as CUDA_VISIBLE_DEVICES takes it, its name, and its CUDA capability."""

    uuid: str
    name: str
    capability: tuple[int, int]


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in the variable's order; empty without NVML.

    Numbers in the variable are read as NVML's device numbers, which equal CUDA's numbers if all GPUs of the
    host are of one kind.
    """
    found, visible = _all(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen: list[Gpu] = []
    for entry in (each.strip() for each in visible.split(",")):
        by_number = found[int(entry) : int(entry) + 1] if entry.isdecimal() else []
        matching = by_number or [gpu for gpu in found if entry and gpu.uuid.startswith(entry)]
        if not matching:  # as in CUDA, an unknown entry hides all entries after it
            break
        chosen.append(matching[0])
    return chosen


def _all() -> list[Gpu]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle)), tuple(capability))
