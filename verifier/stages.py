"""Run the stages of a measurement in GPU workers, and store their results, so that an interrupted measurement
can continue."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from coda_agent.verifier.decision import InvalidMeasurement
from coda_agent.verifier.gates import Failed, Progress
from coda_agent.verifier.gpu.benchmark import PREPARES, RACES
from coda_agent.verifier.gpu.checks import clean
from coda_agent.verifier.report import PROTOCOL
from coda_agent.verifier.worker import Lost, Task, Worker

# Seconds of silence after which a worker counts as hung. The limit is high because a worker is silent while
# tuning compiles kernels and while max-autotune searches.
PATIENCE = 300.0
# Modules that workers import early. The worker for checks does not need torch.compile.
PROVES = ("coda_agent.verifier.gpu.checks", "quack.gemm_sm90")
SCORES = ("coda_agent.verifier.gpu.benchmark", "torch._inductor.compile_fx", "quack.gemm_sm90")


class Checkpoint(Protocol):
    """Stores the results of a measurement's finished stages, by the stages' names."""

    def load(self, piece: str) -> dict[str, Any] | None: ...
    def save(self, piece: str, found: dict[str, Any]) -> None: ...


def start_workers() -> list[Worker]:
    """Start two workers before a measurement, one for checks and one for timing. The workers import modules
    while the caller does other work."""
    return [Worker(ahead=modules) for modules in (PROVES, SCORES)]


@dataclass
class StageRunner:
    """Run the stages of one measurement, and keep their results. One worker tunes and checks. ``processes``
    other workers time the arms. ``ahead``: workers that ``start_workers`` has already started."""

    processes: int
    progress: Progress
    keep: Checkpoint | None
    ahead: list[Worker]
    # by the number of the timing process; None is the key of the worker for checks
    workers: dict[int | None, Worker] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)  # results of stages, by name
    # seconds per stage; a part of a stage has the key "name: part"
    seconds: dict[str, float] = field(default_factory=dict)
    heard: str = ""  # the last progress message of the current worker

    def run(
        self, name: str, task: Task, argument: Any, process: int | None = None, place: str = ""
    ) -> dict[str, Any]:
        """Return a stage's stored result. If no result is stored, run the stage in a worker. ``place`` is the
        name of the stored result, by default the stage's name."""
        stage = name.partition("/")[0]

        def asked() -> dict[str, Any]:
            start, self.heard = time.monotonic(), ""
            try:
                worker = self._worker(process)
                made = worker.ask(task, argument, patience=PATIENCE, progress=self._told)
            except Lost as lost:
                self._expect_clean_gpu()
                self._expect_no_rivals(lost)
                raise
            return made | {"spent": time.monotonic() - start}

        new = name not in self.found
        found = self.kept(name, asked, place)
        if new:
            self._spent(stage, found.get("spent", 0.0))
            for part, seconds in found["seconds"].items() if stage == "score" else ():
                self._spent(f"{stage}: {part}", seconds)
        return found

    def kept(self, name: str, make: Callable[[], dict[str, Any]], place: str = "") -> dict[str, Any]:
        """Return a stage's result. This measurement already has the result, or an interrupted measurement
        stored it under ``place``, or else ``make`` computes it."""
        if name not in self.found:
            place = f"{place or name} by protocol {PROTOCOL}"  # results under another protocol do not count
            kept = self.keep.load(place) if self.keep else None
            if kept is None:
                kept = make()
                if self.keep:
                    self.keep.save(place, kept)
            self.found[name] = kept
        return self.found[name]

    def retire(self, process: int | None) -> None:
        """Stop a worker, which frees its memory."""
        if process in self.workers:
            self.workers.pop(process).close()

    def close(self) -> None:
        """Stop the workers that still run."""
        for worker in (*self.workers.values(), *self.ahead):
            worker.close()

    def seeds(self) -> dict[str, int]:
        """The seeds of all inputs and of the hidden (random) sizes, by stage."""
        return {f"{n}/{k}": seed for n, p in self.found.items() for k, seed in p.get("seeds", {}).items()}

    def rounded(self) -> dict[str, float]:
        """The seconds of each stage, rounded for reports."""
        return {stage: round(seconds, 1) for stage, seconds in self.seconds.items()}

    def share(self, stage: str) -> float:
        """The seconds of a stage, as a fraction of the seconds of all stages."""
        whole = sum(seconds for name, seconds in self.seconds.items() if ":" not in name)
        return round(self.seconds.get(stage, 0.0) / max(whole, 1e-9), 3)

    def _spent(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def _told(self, gate: str, words: str) -> None:
        self.heard = words
        self.progress(gate, words)

    def _worker(self, process: int | None) -> Worker:
        """The worker for the checks, or for one timing process. The call also starts the next worker, so that
        the next worker imports its modules early."""
        for wanted in (process, 0 if process is None else process + 1):
            if wanted not in self.workers and (wanted is None or wanted < self.processes):
                modules = PROVES if wanted is None else SCORES
                self.workers[wanted] = self.ahead.pop(0) if self.ahead else Worker(ahead=modules)
        return self.workers[process]

    def _expect_no_rivals(self, lost: Lost) -> None:
        """Raise InvalidMeasurement if an arm other than the candidate killed the worker. Another arm is the
        cause if the worker died while preparing that arm. Another arm is also the cause if memory ran out
        during timing, because the candidate then allocates no memory."""
        place, _, rival = self.heard.partition(PREPARES)
        if rival:
            raise InvalidMeasurement(
                f"{place}{rival} was lost, which is not the kernel's fault: {lost.message}"
            )
        if self.heard.endswith(RACES) and lost.code == "out_of_memory":
            raise InvalidMeasurement(
                f"{self.heard.removesuffix(RACES)}the GPU's memory is too small for all arms: {lost.message}"
            )

    def _expect_clean_gpu(self) -> None:
        """After a worker is lost, start a fresh one and check that the GPU works."""
        with Worker() as fresh:
            try:
                fresh.ask(clean, None, patience=PATIENCE)
            except Failed as failed:  # Lost is a subclass of Failed
                raise InvalidMeasurement(
                    f"the GPU fails after the loss of a worker: {failed.message}"
                ) from None
