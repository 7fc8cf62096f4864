"""Profile the layers of each width within a time budget. The work at a width consists of stages; the result
file is written after each stage."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from coda_agent.comparison.competitors import COMPILE, PROGRAM
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier.baselines.pytorch import MAX_AUTOTUNE

ARMS = (PROGRAM, COMPILE)
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "quack-kernels")
# A stage starts only if this many seconds are left. The numbers are estimates for empty caches.
NEEDED = {"prepare": 40.0, "times": 18.0, "kernels": 12.0, "operators": 8.0, "clocks": 12.0}
SEARCH = 210.0  # seconds that a width with max-autotune needs, of which the search takes 141 to 177
SAID = 500  # characters of an error that are stored


@dataclass
class TimeBudget:
    """A limit on the seconds of a measurement, which begins when this object is created."""

    seconds: float
    now: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()

    @property
    def spent(self) -> float:
        return self.now() - self.begun

    @property
    def left(self) -> float:
        return self.seconds - self.spent


class ProfileStages(Protocol):
    """The stages that measure one width's layers on a GPU. Each stage returns its part of the result file."""

    def prepare(self) -> dict[str, Any]:
        """Build, compile and tune the arms, and compare their results."""

    def times(self) -> dict[str, Any]:
        """Milliseconds of each arm's forward, backward and both, in interleaved rounds."""

    def kernels(self) -> dict[str, Any]:
        """Microseconds of each kernel of each arm's backward."""

    def operators(self) -> dict[str, Any]:
        """The operator that launches each kernel, with its shapes."""

    def clocks(self) -> dict[str, Any]:
        """Clock rates, power and temperature while each arm repeats."""

    def close(self) -> None:
        """Free the GPU memory."""


Build = Callable[[str, Sequence[str]], ProfileStages]  # makes the stages for a width and arms


def run(widths: Sequence[str], build: Build, budget: TimeBudget, out: Path) -> dict[str, Any]:
    """Measure each width. If enough time is left, measure the first width again, with max-autotune as a
    further arm. ``out`` is written after each stage, and records why a stage failed or was skipped."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": budget.seconds,
        "conditions": _conditions(),
        "versions": {name: _version(name) for name in PACKAGES},
        "widths": {},
    }

    def keep() -> None:
        write_atomic(out, json.dumps(found, indent=1))

    keep()
    for width in widths:
        _profile(found, width, width, ARMS, build, budget, keep)
    if widths and budget.left > SEARCH:
        name = f"{widths[0]} with max-autotune"
        _profile(found, name, widths[0], (*ARMS, MAX_AUTOTUNE), build, budget, keep)
    found["spent"] = round(budget.spent, 1)
    keep()
    failed = {name: entry["failed"] for name, entry in found["widths"].items() if entry["failed"]}
    print(f"{budget.spent:6.1f} s  wrote {out}{f'; without {failed}' if failed else ''}", flush=True)
    return found


def _profile(
    found: dict[str, Any],
    name: str,
    width: str,
    arms: Sequence[str],
    build: Build,
    budget: TimeBudget,
    keep: Callable[[], None],
) -> None:
    entry: dict[str, Any] = {"arms": list(arms), "seconds": {}, "failed": {}}
    found["widths"][name] = entry
    stages = build(width, arms)
    for stage, needed in NEEDED.items():
        if budget.left < needed:
            entry["failed"][stage] = f"not begun: {max(budget.left, 0):.0f} s were left"
        else:
            _stage(entry, name, stage, getattr(stages, stage), budget)
        keep()
        if stage == "prepare" and stage in entry["failed"]:
            break
    stages.close()


def _stage(
    entry: dict[str, Any], name: str, stage: str, call: Callable[[], dict[str, Any]], budget: TimeBudget
) -> None:
    print(f"{budget.spent:6.1f} s  {name}: {stage}", flush=True)
    begun = budget.spent
    try:
        entry |= call()
    except Exception as error:  # the next stage may still work
        traceback.print_exc()
        entry["failed"][stage] = f"{type(error).__name__}: {error}"[:SAID]
    entry["seconds"][stage] = round(budget.spent - begun, 1)


def _conditions() -> dict[str, Any]:
    from coda_agent.verifier.gpu.telemetry import Monitor, device

    known = device()
    if "multiprocessors" not in known:
        return known
    with Monitor() as monitor:
        monitor.sample()
        return known | monitor.summary()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
