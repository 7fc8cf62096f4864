"""Record the device of a measurement, with its clocks, power, temperature and throttling.

Clocks and limits are only read, never set, so a result applies to the machine as its users run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median
from types import ModuleType, TracebackType
from typing import Any, Self

# The sensors sampled while arms run, by their names in reports.
SENSORS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
NEEDED = SENSORS[:3]  # clocks and power, without which the GPU's state under load is unknown


class Monitor:
    """Read the current device's sensors through NVML. ``sample`` takes one reading; ``summary`` covers all
    readings.

    The summary gives a reason for each missing reading. For example, a container may withhold NVML, and a
    virtual GPU may lack some sensors.
    """

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        self._unavailable = ""
        self._readings: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            import pynvml
        except ImportError:
            self._unavailable = "unavailable: pynvml is not installed; pip install nvidia-ml-py"
            return self
        try:
            pynvml.nvmlInit()
            # The device is found by its UUID, because NVML's own numbering ignores CUDA_VISIBLE_DEVICES.
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{card()}")
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            self._unavailable = f"unavailable: {error}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def sample(self) -> None:
        """Read every sensor once, which takes a few tenths of a millisecond."""
        if self._nvml is not None:
            self._readings.append(_read(self._nvml, _sensors(self._nvml, self._handle)))

    def summary(self) -> dict[str, Any]:
        """The driver, the limits on clock and power, each sensor's minimum, median and maximum (MHz, W,
        degrees C), and all reasons for throttling."""
        if self._nvml is None:
            return {"nvml": self._unavailable}
        found = _read(self._nvml, _facts(self._nvml, self._handle))
        for name in SENSORS:
            values = [r[name] for r in self._readings if not isinstance(r[name], str)]
            if values:
                found[name] = [min(values), median(values), max(values)]
            elif self._readings:
                found[name] = self._readings[0][name]
        reasons = [r["throttle"] for r in self._readings]
        told = [r for r in reasons if isinstance(r, list)]
        found["throttle"] = sorted({each for r in told for each in r}) if told else (reasons or [[]])[0]
        return found | {"readings": len(self._readings)}


def unread(seen: object) -> str:
    """A message that names each clock or power reading that a ``summary`` lacks, with the reason; empty if no
    reading is missing."""
    if not isinstance(seen, Mapping) or not seen:
        return "nothing was read"
    if "nvml" in seen:
        return f"NVML {seen['nvml']}"
    return "; ".join(f"{name} {seen.get(name, 'was not read')}" for name in NEEDED if not _range(seen, name))


def findings(during: Mapping[str, object]) -> list[str]:
    """Messages on clocks or power that were not read. Each reason gives one message, which names the affected
    stages."""
    reasons: dict[str, list[str]] = {}
    for piece, seen in during.items():
        if why := unread(seen):
            reasons.setdefault(why, []).append(piece)
    return [
        f"clocks and power are not known, so this is not evidence: {why} (during {', '.join(pieces)})"
        for why, pieces in reasons.items()
    ]


def _range(seen: Mapping[str, Any], name: str) -> bool:
    """Whether a summary has the minimum, median and maximum of a sensor."""
    match seen.get(name):
        case [float() | int() as least, float() | int() as middle, float() | int() as greatest]:
            return 0 < least <= middle <= greatest < math.inf
    return False


def device() -> dict[str, Any]:
    """The current device, and the version of PyTorch."""
    import torch

    known: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return known | {"gpu": "unavailable: torch sees no CUDA device"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return known | {
        "gpu": properties.name,
        "uuid": str(properties.uuid),
        "multiprocessors": properties.multi_processor_count,
    }


def card() -> str:
    """The UUID of the current device."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


Readers = dict[str, Callable[[], Any]]


def _facts(nvml: Any, handle: Any) -> Readers:
    return {
        "driver": nvml.nvmlSystemGetDriverVersion,
        "sm_mhz_max": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    }


def _sensors(nvml: Any, handle: Any) -> Readers:
    return {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle": lambda: _throttle(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }


def _read(nvml: Any, readers: Readers) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except nvml.NVMLError as error:
            found[name] = f"unavailable: {error}"
    return found


_THROTTLE = {
    "idle": "nvmlClocksThrottleReasonGpuIdle",
    "application clocks": "nvmlClocksThrottleReasonApplicationsClocksSetting",
    "software power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "sync boost": "nvmlClocksThrottleReasonSyncBoost",
    "software thermal": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware thermal": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


def _throttle(nvml: Any, mask: int) -> list[str]:
    return [name for name, constant in _THROTTLE.items() if mask & getattr(nvml, constant)]
