"""A stand-in for NVML's Python module. It reports one H100, which the test machine lacks."""

from __future__ import annotations


class NVMLError(Exception): ...


def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return "GPU-12ab"


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA H100 80GB HBM3"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return 9, 0
