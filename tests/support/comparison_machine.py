"""A stand-in for a GPU. The workers of a comparison return invented figures, or fail if a test asks for a
failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coda_agent.comparison import environment, keys, measuring, rows, workers
from coda_agent.comparison.competitors import COMPILE, EAGER, LIGER, PROGRAM, REFERENCE_ARM, UPSTREAM
from coda_agent.comparison.drawing.cells import Cell, Empty, lines
from coda_agent.comparison.interleaved import compile_ahead, machine, tune_ahead
from coda_agent.comparison.interleaved import gpu as gpu_task
from coda_agent.comparison.measuring import ComparisonRequest
from coda_agent.comparison.results import LAYER_BOTH, LAYER_FORWARD, Results
from coda_agent.verifier.baselines.quack import OWN_TUNER
from coda_agent.verifier.gpu.checks import clean
from coda_agent.verifier.worker import Lost

H100 = {"tensor": 8e14, "tensor_fp8": 1.6e15, "memory": 3e12}
ARMS = (EAGER, COMPILE, LIGER, OWN_TUNER, UPSTREAM, PROGRAM, REFERENCE_ARM)
SPEEDS = {
    EAGER: 2.0,
    COMPILE: 1.5,
    LIGER: 1.8,
    OWN_TUNER: 1.1,
    PROGRAM: 1.0,
    REFERENCE_ARM: 0.9,
    UPSTREAM: 1.2,
}


def asked(*names: str, processes: int = 1, arms: tuple[str, ...] = ARMS, **more: Any) -> ComparisonRequest:
    chosen = rows.choose_rows(names or ("gemm_swiglu",), ("1B",), everything=False, quick=False)
    return ComparisonRequest(tuple(chosen), arms, processes, 12, **more)


def kept_nowhere(made: Results) -> None:
    pass


def never(made: Results) -> None:
    raise AssertionError("nothing was to be measured")


def cells(results: Results) -> dict[str, Cell | Empty]:
    (line,) = lines(results)
    return dict(line.cells)


class Machine:
    """Stands in for ``verifier.worker.Worker``. ``sat`` records the interpreter and the arms of each
    session."""

    def __init__(self) -> None:
        self.sat: list[tuple[str | None, tuple[str, ...]]] = []
        # for each request, the arms of the rows to compile before all sessions
        self.compiled: list[list[tuple[str, ...]]] = []
        self.tuned: list[tuple[str, ...]] = []  # the arms of each row to tune before its sessions
        self.compiler_dies = False
        self.tuning_kills: set[str] = set()
        self.deadly: set[str] = set()
        # interpreters whose sessions run out of GPU memory before the first arm
        self.crowded: set[str | None] = set()
        self.broken: dict[str, str] = {}
        self.gone = False  # whether the GPU has become unusable
        self.interrupted_at = -1
        self.name, self.torch = "a GPU", "2.0+cu130"
        self.ceilings = 0  # how often the ceilings were measured
        self.seconds, self.now = 0.0, 0.0  # the seconds that a session takes, and the current time
        self.prepared = 0.0  # the seconds that an arm reports
        self.slow: dict[str, float] = {}  # by arm or layer: the seconds that its session takes
        self.opened: list[Seat] = []
        self.ready: list[int] = []  # for each session, the number of workers created by its start

    def __call__(self, python: str | None = None, ahead: tuple[str, ...] = ()) -> Any:
        self.opened.append(Seat(self, python, ahead))
        return self.opened[-1]

    def others(self, seat: Seat) -> list[Seat]:
        """Return the other workers that hold memory of the GPU."""
        return [other for other in self.opened if other is not seat and other.asked and not other.closed]

    def ask(self, python: str | None, task: Any, asked: Any, *, progress: Any = None, **_: Any) -> Any:
        if task is gpu_task:
            return {"gpu": self.name, "torch": self.torch, "cuda": "13.0"}
        if task is clean:
            if self.gone:
                raise Lost("device_error", "uncorrectable ECC error")
            return {"free_bytes": 1}
        if task is machine:
            self.ceilings += 1
            return {"gpu": self.name, "ceilings": H100}
        if task is compile_ahead:
            self.compiled.append([seats.arms for seats in asked])
            if self.compiler_dies:
                raise Lost("crashed", "the compiler died")
            return {}
        if task is tune_ahead:
            self.tuned.append(asked.arms)
            progress("compare", "tuning")
            if self.tuning_kills & set(asked.arms):
                raise Lost("crashed", "a schedule wrote astray")
            return {}
        if len(self.sat) == self.interrupted_at:
            raise KeyboardInterrupt
        self.sat.append((python, asked.arms))
        self.ready.append(len(self.opened))
        self.now += next((self.slow[name] for name in _names(asked) if name in self.slow), self.seconds)
        if self.gone:
            raise Lost("device_error", "uncorrectable ECC error")
        if python in self.crowded:
            raise Lost("out_of_memory", "the GPU has too little memory")
        for arm in asked.arms:
            progress("compare", arm)
            progress("compare", f"{arm} compiles")
            if arm in self.deadly:
                raise Lost("crashed", f"{arm} wrote astray")
        left = [arm for arm in asked.arms if arm not in self.broken]
        scale = 1 + 0.001 * len(self.sat)
        told = {
            arm: {
                "milliseconds": [SPEEDS.get(arm, 3.0) * scale] * 12,
                "losses": {},
                "bytes": 1 << 20,
                "seconds": self.prepared,
            }
            for arm in left
        }
        failed = {arm: why for arm, why in self.broken.items() if arm in asked.arms}
        return {"arms": told, "failed": failed, "conditions": {"gpu": self.name}}


def _names(asked: Any) -> tuple[str, ...]:
    """Return the keys of a session's arms and of its layer, if it has one."""
    layer = () if hasattr(asked, "spec") else (LAYER_BOTH if asked.backward else LAYER_FORWARD,)
    return (*asked.arms, *layer)


class Seat:
    """A worker of a ``Machine``. When a worker gets a request, no other worker may hold memory of the GPU."""

    def __init__(self, owner: Machine, python: str | None, ahead: tuple[str, ...]):
        self.owner, self.python, self.ahead, self.asked, self.closed = owner, python, ahead, False, False

    def ask(self, *given: Any, **more: Any) -> Any:
        self.asked = True
        assert not self.closed and not self.owner.others(self)
        return self.owner.ask(self.python, *given, **more)

    def close(self) -> None:
        self.closed = True


@contextmanager
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Replace the workers and environments that ``comparison.measuring`` uses; yield the stand-in."""
    found = Machine()
    monkeypatch.setattr(workers, "Worker", found)
    monkeypatch.setattr(measuring, "monotonic", lambda: found.now)
    monkeypatch.setattr(environment, "python", lambda: "/other/python")
    monkeypatch.setattr(environment, "versions", lambda python, packages: dict.fromkeys(packages, "0.2"))
    monkeypatch.setattr(keys, "version", lambda name: "1.0" if name != "liger-kernel" else "0.8.5")
    yield found
    assert all(seat.closed for seat in found.opened)  # every worker is closed, however its session ended
