"""Reports state the GPU's clocks, power and temperature, which the verifier reads from NVML. Without NVML, a
report states why nothing was read."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from coda_agent.verifier.gpu import telemetry
from coda_agent.verifier.gpu.telemetry import Monitor, device, findings, unread

# NVML's constants for throttling, by the names that reports use
REASONS = {
    "idle": "nvmlClocksThrottleReasonGpuIdle",
    "application clocks": "nvmlClocksThrottleReasonApplicationsClocksSetting",
    "software power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "sync boost": "nvmlClocksThrottleReasonSyncBoost",
    "software thermal": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware thermal": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


class FakeNvml(ModuleType):
    """A fake NVML module. The clock of its GPU falls, and the temperature of its GPU is unavailable."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.clocks = itertools.count(1980, -15)
        self.open = 0
        for bit, constant in enumerate(REASONS.values()):
            setattr(self, constant, 1 << bit)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.0"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert handle == "GPU-1-2"
        return next(self.clocks) if kind == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 512_000

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0b101 if next(self.clocks) < 1960 else 0b001


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(telemetry, "card", lambda: "1-2")
    return made


def test_a_monitor_tells_the_range_of_each_sensor_and_every_reason_for_throttling(nvml: FakeNvml) -> None:
    with Monitor() as monitor:
        for _ in range(3):
            monitor.sample()
        found = monitor.summary()
    assert found["sm_mhz"] == [1920, 1950, 1980] and found["memory_mhz"] == [2619, 2619, 2619]
    assert found["power_w"] == [512.0, 512.0, 512.0] and found["power_limit_w"] == 700.0
    assert found["temperature_c"] == "unavailable: Not Supported"
    assert found["throttle"] == ["idle", "software power cap"]
    assert found["readings"] == 3 and found["driver"] == "580.0"
    assert nvml.open == 0


def test_every_reason_for_throttling_has_its_name(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for bit, name in enumerate(REASONS):
        monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _, n=bit: 1 << n)
        with Monitor() as monitor:
            monitor.sample()
            assert monitor.summary()["throttle"] == [name]


READ = {"sm_mhz": [1395, 1440.0, 1485], "memory_mhz": [2619, 2619, 2619], "power_w": [693.1, 697.8, 698.0]}


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (READ, ""),
        (READ | {"temperature_c": "unavailable: Not Supported"}, ""),
        ({}, "nothing was read"),
        ([], "nothing was read"),
        ({"nvml": "unavailable: Driver Not Loaded"}, "NVML unavailable: Driver Not Loaded"),
        (READ | {"power_w": "unavailable: Not Supported"}, "power_w unavailable: Not Supported"),
        ({k: v for k, v in READ.items() if k != "sm_mhz"}, "sm_mhz was not read"),
        (READ | {"memory_mhz": [2619, 2619]}, "memory_mhz [2619, 2619]"),
        (READ | {"memory_mhz": [2619, 1, 2619]}, "memory_mhz [2619, 1, 2619]"),
        (READ | {"power_w": [0, 697.8, 698.0]}, "power_w [0, 697.8, 698.0]"),
    ],
)
def test_evidence_has_clocks_and_power(seen: object, words: str) -> None:
    assert unread(seen) == words


def test_a_measurement_without_clocks_or_power_says_so_once_a_reason() -> None:
    assert findings({"score/0/large": READ, "score/0/wide": READ}) == []
    blind = {"nvml": "unavailable: pynvml is not installed; pip install nvidia-ml-py"}
    (said,) = findings({"score/0/large": blind, "score/0/wide": blind, "score/1/large": READ})
    assert said == (
        "clocks and power are not known, so this is not evidence: NVML unavailable: pynvml is not installed; "
        "pip install nvidia-ml-py (during score/0/large, score/0/wide)"
    )


def test_without_nvml_the_reason_is_told(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise nvml.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    with Monitor() as monitor:
        monitor.sample()
        assert monitor.summary() == {"nvml": "unavailable: Driver Not Loaded"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Monitor() as monitor:
        assert "pip install nvidia-ml-py" in monitor.summary()["nvml"]


def test_a_device_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: dict[str, Any] = device()
    assert found["torch"] == torch.__version__ and "unavailable" in found["gpu"]
