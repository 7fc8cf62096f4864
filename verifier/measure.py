"""The gates that need a GPU: numerics, stability, benchmark, decision. These gates run on a program that has
passed all earlier gates.

The candidate's source never runs here, because these gates take the traced program. All GPU work happens in
workers (``verifier.worker``). The work is divided into stages with stored results, so an interrupted
measurement can continue. One worker tunes and checks the kernel. Then several fresh workers time the kernel,
each on its own inputs.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.schedule import by_step
from coda_agent.primitives.target import TARGET
from coda_agent.verifier.baselines.pytorch import CUBLAS
from coda_agent.verifier.baselines.quack import MATMUL, admitted
from coda_agent.verifier.decision import (
    BASELINE,
    KEPT,
    PROCESSES,
    InvalidMeasurement,
    central,
    compared,
    decide,
)
from coda_agent.verifier.gates import Failed, Gates, Progress, Stop, identity, silent
from coda_agent.verifier.gpu.benchmark import Benchmark, score
from coda_agent.verifier.gpu.checks import KernelCase, Schedules, numerics, stability, tune
from coda_agent.verifier.gpu.telemetry import findings
from coda_agent.verifier.incumbent import Incumbent, Known, parse_schedules, worth_racing
from coda_agent.verifier.numerics import failed_draws
from coda_agent.verifier.report import (
    CANDIDATE,
    PROTOCOL,
    Finalists,
    Measured,
    Measurement,
    QuackTuned,
    Timing,
    Unmeasured,
)
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Case
from coda_agent.verifier.spec.rules import HIDDEN, ONE_ROW
from coda_agent.verifier.stages import Checkpoint, StageRunner
from coda_agent.verifier.worker import Worker

DEFAULT_ARMS = (BASELINE, CUBLAS, MATMUL)
ROUNDS = 40  # largest number of rounds per process
# a case of at most this many FLOPs is tried with every family of inputs, because the fp64 reference is fast
FEW_FLOPS = 5e10
ROUTINE = ("normal", "positive")  # input families that are tried on larger cases
# the family of inputs for a single row, where exact results say more than statistics
SINGLE_ROW = ("integers",)
# The controls (the candidate again, without and with a planted delay) run on the case whose roofline is
# nearest to this time. The time is long enough that a launch is a small part of it, and short enough for many
# rounds.
CONTROL_SECONDS = 1e-3
RETRIES = 2  # how often a process may be replaced because its controls failed


@dataclass(frozen=True)
class MeasureOptions:
    """How to measure. ``arms``: names from ``verifier.baselines.pytorch.BASELINES`` or
    ``verifier.baselines.quack.ARMS``. QuACK's arms are left out if QuACK cannot compute the spec. The
    torch.compile arm is required, because the decision compares with it. ``rounds``: rounds per process; long
    kernels get fewer rounds. ``sanitize``: also run small sizes under compute-sanitizer."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    rounds: int = ROUNDS
    processes: int = PROCESSES
    cold: bool = True
    sanitize: bool = False


def measure(
    spec: Spec,
    kernel: KernelSource,
    options: MeasureOptions | None = None,
    *,
    progress: Progress = silent,
    keep: Checkpoint | None = None,
    known: Mapping[str, Known] | None = None,
    kept: Incumbent | None = None,
    quack: Mapping[str, QuackTuned] | None = None,
    ahead: Sequence[Worker] = (),
) -> Measurement:
    """Run the GPU gates on every case of the spec.

    ``known``: schedules worth timing, by case and step. ``kept``: the incumbent (an accepted kernel). The
    decision compares the candidate with the incumbent as well as with the baseline. If the kernel is edited
    code without known schedules, tuning tries only the schedules in the incumbent's last tuning round.
    ``quack``: known schedules of QuACK's arms, by case. ``ahead``: workers that ``start_workers`` has
    started; this function closes them.
    """
    gates = Gates(progress)
    options, known, quack = options or MeasureOptions(), known or {}, quack or {}
    stages = StageRunner(options.processes, progress, keep, [*ahead])
    try:
        return _Session(spec, kernel, options, gates, stages, known, kept, quack).run()
    except Stop as stop:
        return stop.rejected
    except InvalidMeasurement as void:
        return Unmeasured(reason=str(void), evidence=void.evidence)
    finally:
        stages.close()


@dataclass
class _Session:
    """One measurement: its gates and its stages so far."""

    spec: Spec
    kernel: KernelSource
    options: MeasureOptions
    gates: Gates
    stages: StageRunner
    known: Mapping[str, Known]
    kept: Incumbent | None
    quack: Mapping[str, QuackTuned] = field(default_factory=dict)
    # by case: the result of ``score`` in each process
    scores: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # results of the controls in every process, including failed attempts
    controls: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Measured:
        gates, start = self.gates, time.monotonic()
        remembered = failed_draws.remembered(self.spec, self.kernel.program, "cuda")
        with gates.gate("numerics") as figures, remembered:
            figures |= self._numerics()
        with gates.gate("stability") as figures:
            figures |= self._stability()
        if self.options.sanitize:
            with gates.gate("sanitizer") as figures:
                figures |= self._sanitized()
        with gates.gate("benchmark") as figures:
            timings = self._benchmark()
            figures |= {"stages": self.stages.rounded(), "tuning_share": self.stages.share("tune")}
            figures |= {"against_itself": self._against_itself()}
            told = {name: p["conditions"] for name, p in self.stages.found.items() if "conditions" in p}
            figures["findings"], conditions = findings(told), _conditions(told)
        with gates.gate("decision") as figures:
            decide(self.spec, self.kernel.program, timings, figures, TARGET.on(conditions.get("gpu")))
        return Measured(
            protocol=PROTOCOL,
            identity=identity(self.spec, self.kernel),
            rival=self._beaten(),
            gates=tuple(gates.passed),
            timings=timings,
            conditions=conditions,
            controls=tuple(self.controls),
            seconds=self.stages.rounded() | {"all": round(time.monotonic() - start, 1)},
            seeds=self.stages.seeds(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _beaten(self) -> str:
        return identity(self.spec, self.kept.kernel).lowered_hash if self.kept else ""

    # Gates

    def _numerics(self) -> dict[str, Any]:
        """Check the draws on which this program failed before and small sizes with the compile gate's
        schedules, then every measured case with its tuned schedules, then the small sizes with the tuned
        schedules."""
        from coda_agent.primitives.compiler.probe_schedules import choices

        figures = {}
        for draw in failed_draws.of(self.spec, self.kernel.program, "cuda"):
            tried = tuple(choices(self.kernel.program, lower(self.kernel.program).gemms, draw.sizes))
            again = {"schedules": tried, "families": (draw.family,), "seed": draw.seed}
            self._proved("numerics", self._of(f"failed draw {draw.seed}", draw.sizes, **again))
        for job in self._small():
            figures[job.case] = self._proved("numerics", job)
        for case in self._measured_cases():
            figures[case.name] = self._proved("numerics", self._job(case))
        for job in self._small(self._chosen()):
            self._proved("numerics", job, "tuned ")
        return figures

    def _stability(self) -> dict[str, Any]:
        small = [*self._small(), *(self._job(case) for case in self._measured_cases())]
        return {job.case: self._proved("stability", job) for job in small}

    def _sanitized(self) -> dict[str, Any]:
        from coda_agent.verifier.gpu.sanitizer import sanitized

        kept = self.stages.kept
        return {job.case: kept(f"sanitizer/{job.case}", partial(sanitized, job)) for job in self._small()}

    def _proved(self, gate: str, job: KernelCase, note: str = "") -> dict[str, Any]:
        task = {"numerics": numerics, "stability": stability}[gate]
        found = self.stages.run(f"{gate}/{note}{job.case}", task, job)
        return {key: value for key, value in found.items() if key not in ("seeds", "spent")}

    def _benchmark(self) -> tuple[Timing, ...]:
        cases = self._measured_cases()
        for case in cases:
            self._rival(case)
        self.stages.retire(None)  # frees the checking worker's memory for the timing processes
        control = self._control_case()
        for process in range(self.options.processes):
            self._controlled(process, control)
            for case in cases:
                if case is not control:
                    self._scored(process, case)
            self.stages.retire(process)
        return tuple(self._timing(case) for case in cases)

    def _control_case(self) -> Case:
        def distance(case: Case) -> float:
            return abs(math.log(roofline(self.kernel.program, case.sizes).seconds / CONTROL_SECONDS))

        return min(self._measured_cases(), key=distance)

    def _controlled(self, process: int, case: Case) -> None:
        """Time a case with controls in one process; if the controls fail, repeat in a fresh process. The
        process must detect the planted delay, and must find no difference between two timings of the same
        kernel. Failed attempts are reported but do not count."""
        for attempt in range(1 + RETRIES):
            found = self._scored(process, case, attempt)["controls"]
            self.controls.append({"process": process, "attempt": attempt, "case": case.name} | found)
            if not found["faults"]:
                return
            self.scores[case.name].pop()
            self.stages.retire(process)
        raise InvalidMeasurement(f"process {process}: " + "; ".join(found["faults"]), controls=self.controls)

    def _against_itself(self) -> dict[str, Any]:
        """The ratio between two timings of the same kernel, over all valid processes. The report contains
        this ratio, but the decision does not use it, because the controls have judged each process."""
        scores = self.scores[self._control_case().name]
        again, own = [s["again"] for s in scores], [s["samples"][CANDIDATE] for s in scores]
        return compared(again, own).model_dump()

    def _scored(self, process: int, case: Case, attempt: int | None = None) -> dict[str, Any]:
        """Time one case in one process. ``attempt``: the number of the attempt, for a timing with
        controls."""
        controlled = attempt is not None
        arms, known = self._arms(), self.quack.get(case.name)
        race = Benchmark(arms, self.options.rounds, self.options.cold, controlled, self._rival(case), known)
        name = f"score/{process}/{case.name}" + (f"/controlled.{attempt}" if controlled else "")
        # the settings that a score depends on, such as the arms and the rounds
        asked = json.dumps([arms, self.options.rounds, self.options.cold, self._beaten()])
        place = f"{name} {hashlib.sha256(asked.encode()).hexdigest()[:8]}"
        found = self.stages.run(name, score, (self._job(case), race), process, place)
        self._expect_same_device(found["conditions"])
        self.scores.setdefault(case.name, []).append(found)
        return found

    def _expect_same_device(self, conditions: Mapping[str, Any]) -> None:
        """Raise InvalidMeasurement if an interrupted measurement continues on another machine, because a
        report covers one machine."""
        first = next(found["conditions"] for found in self.stages.found.values() if "conditions" in found)
        known = [key for key in DEVICE if key in first and key in conditions]
        if any(first[key] != conditions[key] for key in known):
            began, here = (", ".join(str(each[key]) for key in known) for each in (first, conditions))
            raise InvalidMeasurement(
                f"it began on another machine ({began}; this one is {here}): start it again"
            )

    def _timing(self, case: Case) -> Timing:
        scores, tuned = self.scores[case.name], self._tuned(case)
        samples = {arm: tuple(tuple(s["samples"][arm]) for s in scores) for arm in scores[0]["samples"]}
        own, gpu = samples[CANDIDATE], scores[0]["conditions"].get("gpu")
        bound = roofline(self.kernel.program, case.sizes, TARGET.on(gpu))
        return Timing(
            case=case.name,
            sizes=dict(case.sizes),
            schedules=tuned["schedules"],
            milliseconds={arm: round(central(rows), 5) for arm, rows in samples.items()},
            ratios={arm: compared(rows, own) for arm, rows in samples.items() if arm != CANDIDATE},
            roofline_milliseconds=round(bound.seconds * 1e3, 5),
            host_microseconds={
                arm: round(median(s["host_microseconds"][arm] for s in scores), 2)
                for arm in scores[0]["host_microseconds"]
            },
            graph_milliseconds=round(median(s["graph_milliseconds"] for s in scores), 5),
            parts={
                part: round(median(s["parts"][part] for s in scores), 5)
                for part in scores[0].get("parts", ())
            },
            tuning_seconds=tuned["seconds"],
            finalists=tuned["finalists"],
            kept_schedules=self._rival_tuned(case)["schedules"] if self.kept else {},
            quack=_agreed([s.get("quack", {}) for s in scores]),
            processes=len(scores),
            rounds=min(map(len, own)),
            cold=self.options.cold,
            input_sets=scores[0]["input_sets"],
            samples=samples,
        )

    # Cases, arms and jobs

    def _measured_cases(self) -> list[Case]:
        return [case for case in self.spec.cases if case.bench]

    def _arms(self) -> tuple[str, ...]:
        return admitted(self.spec, self.options.arms, beside_kept=bool(self.kernel.edited and self.kept))

    def _job(self, case: Case) -> KernelCase:
        """The job of a measured case on its tuned schedules. The job covers every family of inputs if the
        fp64 reference is fast enough."""
        from coda_agent.verifier.numerics.inputs import EVERY

        flops = roofline(self.kernel.program, case.sizes).flops
        families = EVERY if flops <= FEW_FLOPS else ROUTINE
        tuned = by_step(self._tuned(case)["schedules"])
        return self._of(case.name, case.sizes, schedules=(tuned,), families=families)

    def _tuned(self, case: Case) -> dict[str, Any]:
        # If there is an incumbent, the candidate and the incumbent are both tuned in this measurement. An
        # earlier tuning could be from another day, from other clock rates or from another GPU.
        job = self._of(case.name, case.sizes, known=self._to_race(case), afresh=self.kept is not None)
        return self.stages.run(f"tune/{case.name}", tune, job)

    def _to_race(self, case: Case) -> Known | None:
        """The schedules that tuning tries: the known good schedules. Edited code without known schedules gets
        the incumbent's finalists. If edited code had other schedules than the incumbent, the measurement
        would compare schedules instead of code."""
        if not (self.kernel.edited and self.kept) or case.name in self.known:
            return self.known.get(case.name)
        rival = self._rival_tuned(case)
        return worth_racing(
            by_step(rival["schedules"]), parse_schedules({case.name: rival["finalists"]})[case.name]
        )

    def _rival(self, case: Case) -> KernelCase | None:
        """The incumbent's job, on schedules tuned in this measurement; None if there is no incumbent."""
        if self.kept is None:
            return None
        tuned = by_step(self._rival_tuned(case)["schedules"])
        return replace(self.kept.job(self.spec, case), schedules=(tuned,))

    def _rival_tuned(self, case: Case) -> dict[str, Any]:
        """The result of tuning the incumbent. Raises InvalidMeasurement if the incumbent does not run here,
        because this failure says nothing about the candidate."""
        assert self.kept is not None
        try:
            return self.stages.run(f"tune/{case.name}, {KEPT}", tune, self.kept.job(self.spec, case))
        except Failed as failed:
            raise InvalidMeasurement(f"{KEPT} could not be tuned: {failed.message}") from None

    def _of(self, name: str, sizes: Mapping[str, int], **more: Any) -> KernelCase:
        """A job for this kernel; ``more`` are further fields of the job."""
        return KernelCase(self.spec, self.kernel, name, sizes, **more)

    def _small(self, tuned: Sequence[Schedules] = ()) -> list[KernelCase]:
        """Jobs for the unmeasured cases and the hidden sizes. Without ``tuned``, each job runs on all
        schedules of the compile gate. With ``tuned``, a job runs on the ``tuned`` schedules that fit its
        sizes. If none of them fits, the job runs on one schedule of the compile gate."""
        from coda_agent.primitives.compiler.probe_schedules import choices, fits
        from coda_agent.verifier.numerics.inputs import EVERY

        program = self.kernel.program
        gemms = lower(program).gemms
        named = [(case.name, dict(case.sizes)) for case in self.spec.cases if not case.bench]
        named += self.stages.kept("hidden", partial(_new_hidden_sizes, self.spec))["sizes"].items()
        jobs = []
        for name, sizes in named:
            tried: Sequence[Schedules] = choices(program, gemms, sizes)
            if tuned:
                fitting = [s for s in tuned if all(fits(program, g, s[g.step], sizes) for g in gemms)]
                tried = fitting or tried[:1]
            families = SINGLE_ROW if name == ONE_ROW else EVERY
            jobs.append(self._of(name, sizes, schedules=tuple(tried), families=families))
        return jobs

    def _chosen(self) -> list[Schedules]:
        """The schedules that tuning chose for the measured cases, without duplicates."""
        every = [self._job(case).schedules[0] for case in self._measured_cases()]
        return [s for i, s in enumerate(every) if s not in every[:i]]


def _new_hidden_sizes(spec: Spec) -> dict[str, Any]:
    """Two new sets of hidden sizes, one of them with a single row, and their seeds."""
    from coda_agent.verifier.numerics.sizes import hidden

    seeds = {name: secrets.randbits(48) for name in (HIDDEN, ONE_ROW)}
    sizes = {HIDDEN: hidden(spec, seeds[HIDDEN]), ONE_ROW: hidden(spec, seeds[ONE_ROW], rows=1)}
    return {"sizes": sizes, "seeds": seeds}


def _agreed(scores: Sequence[Mapping[str, Finalists]]) -> dict[str, Finalists]:
    """The finalists (schedules of the last tuning round) of each QuACK arm. An arm is left out if two
    processes have different finalists, for example because QuACK's cache was emptied between them."""
    first, *others = scores
    return {arm: told for arm, told in first.items() if all(other.get(arm) == told for other in others)}


DEVICE = ("gpu", "uuid", "driver", "torch", "cuda", "multiprocessors")


def _conditions(pieces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The device, listed once, and the clocks and power of each stage."""
    first = next(iter(pieces.values()), {})
    told = {key: first[key] for key in DEVICE if key in first}
    during = {n: {k: v for k, v in found.items() if k not in DEVICE} for n, found in pieces.items()}
    return told | {"during": during}
