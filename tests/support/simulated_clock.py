"""A simulated device, whose clock moves only when a test moves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coda_agent.verifier.timing import Arm


@dataclass
class SimulatedClock:
    """A device whose time passes only in ``flush`` and in calls of the arms that ``work`` returns. The device
    logs flushes, starts, stops, waits and calls of arms."""

    time: float = 0.0
    log: list[str] = field(default_factory=list)
    regions: list[list[float]] = field(default_factory=list)
    before: list[list[float]] = field(default_factory=list)
    drift: float = 0.0  # relative slow-down per simulated second

    def now(self) -> float:
        return self.time

    def flush(self) -> None:
        self.log.append("flush")
        self.time += 0.01

    def start(self) -> int:
        self.log.append("start")
        self.regions.append([self.time])
        return len(self.regions) - 1

    def stop(self, mark: int) -> None:
        self.log.append("stop")
        self.regions[mark].append(self.time)

    def turn(self) -> tuple[float, ...]:
        self.log.append("wait")
        seconds = self.drain()
        self.before, self.regions = self.regions, []
        return seconds

    def drain(self) -> tuple[float, ...]:
        ended, self.before = self.before, []
        return tuple(end - begin for begin, end in ended)

    def work(self, name: str, seconds: Callable[[], float]) -> Arm:
        def call() -> None:
            self.log.append(name)
            self.time += seconds() * (1 + self.drift * self.time)

        return Arm(name, call)
