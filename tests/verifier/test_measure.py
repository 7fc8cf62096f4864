"""Tests of the course of a measurement: which worker gets which tasks, which results are kept, and when a
measurement is void or lost.

The workers are stand-ins that return invented figures. test_gpu_worker.py tests real workers, and tests/gpu
tests real figures.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from authoring import TOY, TOY_KERNEL, program_of, write_toy

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier import measure as measuring
from coda_agent.verifier import stages
from coda_agent.verifier.baselines.quack import MATMUL
from coda_agent.verifier.gates import Failed, Progress, silent
from coda_agent.verifier.gpu.benchmark import PREPARES, RACES, Benchmark, faults, score
from coda_agent.verifier.gpu.checks import KernelCase, clean, numerics, stability, tune
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions, measure
from coda_agent.verifier.numerics.inputs import EVERY
from coda_agent.verifier.report import PROTOCOL, Measured, QuackTuned, Rejected, Unmeasured
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.statistics import Interval, ratio
from coda_agent.verifier.worker import Lost

SCHEDULE = {"tile_m": 128, "tile_n": 192, "pingpong": True}
TUNED = {"schedules": {"0": SCHEDULE}, "finalists": {}, "seconds": 1.0, "seeds": {"tuning": 1}}
Answer = Callable[[Any], dict[str, Any]]


class Workers:
    """A stand-in for ``verifier.worker.Worker`` that records the tasks of each worker."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.jobs: list[KernelCase] = []
        self.answers: dict[Any, Answer] = {
            tune: lambda job: {
                "schedules": {"0": SCHEDULE},
                "finalists": {},
                "seconds": 1.0,
                "seeds": {"tuning": 1},
            },
            numerics: lambda job: {
                "outputs": {},
                "families": list(job.families),
                "seeds": {"numerics/normal": 2},
            },
            stability: lambda job: {"repeats": 20, "seeds": {"stability": 3}},
            score: self.score,
            clean: lambda _: {"free_bytes": 1},
        }
        self.gpu = "NVIDIA H100"
        self.speedup = 1.5
        self.slowness = 2.0  # the time of the kernel over its roofline on an H100
        self.gain = 1.1  # the speedup over the incumbent
        self.kept: list[KernelCase | None] = []
        self.races: list[Benchmark] = []
        self.chosen: Iterator[int] = itertools.repeat(128)
        self.faults: Iterator[list[str]] = itertools.repeat([])  # the faults that successive controls find
        self.progress: Progress = silent  # the callback that the last task received

    def __call__(self, ahead: tuple[str, ...] = ()) -> Any:
        self.asked.append([])
        return _Worker(self, self.asked[-1])

    def score(self, given: Any) -> dict[str, Any]:
        """Return the figures of one process. Ratios differ by 0.2% between processes, and times by 0.5%
        between rounds."""
        job, race = given
        generator = random.Random(len(self.asked))
        own = 1e3 * self.slowness * roofline(job.kernel.program, job.sizes).seconds
        factors = {"torch.compile": self.speedup * generator.gauss(1, 0.002), "cuBLAS matmul": 0.9}
        factors["the kernel before"] = self.gain
        kept = ["the kernel before"] if race.kept else []
        self.kept.append(race.kept)
        samples = {
            arm: [own * factors.get(arm, 1.0) * generator.gauss(1, 0.005) for _ in range(race.rounds)]
            for arm in ("candidate", *race.arms, *kept)
        }
        again = [own * generator.gauss(1, 0.005) for _ in range(race.rounds)]
        controls = {"controls": {"faults": next(self.faults)}, "again": again} if race.controlled else {}
        return controls | {
            "samples": samples,
            "host_microseconds": {"candidate": 12.0, "cuBLAS matmul": 17.0},
            "graph_milliseconds": own,
            "parts": {"gemm of step 0": own * generator.gauss(1, 0.005), "vector of step 0": 0.01},
            "quack": self.quack(race),
            "input_sets": 2,
            "conditions": {"gpu": self.gpu, "driver": "1", "sm_mhz": [1, 2, 3]},
            "seeds": {"benchmark/0": len(self.asked)},
            "seconds": {"inputs": 1.0, "rivals": 2.0, "race": 4.0},
        }

    def quack(self, race: Benchmark) -> dict[str, Any]:
        """Return the tuned schedules of QuACK's matmul in one process. Other processes may have others."""
        self.races.append(race)
        chosen = next(self.chosen)
        return {arm: [[{"tile_m": chosen}, {"tile_m": 64}]] for arm in race.arms if arm == MATMUL}

    def tasks(self, name: str) -> list[tuple[int, str]]:
        """Return the worker's number and the case of every task with this name."""
        return [(i, case) for i, asked in enumerate(self.asked) for task, case in asked if task == name]


class _Worker:
    def __init__(self, all_of_them: Workers, asked: list[tuple[str, str]]):
        self._all, self._asked, self.closed = all_of_them, asked, False

    def ask(self, task: Any, argument: Any, *, progress: Progress = silent, **_: object) -> dict[str, Any]:
        assert not self.closed
        self._all.progress = progress
        job = argument[0] if task is score else argument
        self._asked.append((task.__name__, job.case if job else ""))
        if job:
            self._all.jobs.append(job)
        return self._all.answers[task](argument)

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Memory:
    """A store for the finished pieces of a measurement."""

    def __init__(self) -> None:
        self.pieces: dict[str, dict[str, Any]] = {}

    def load(self, piece: str) -> dict[str, Any] | None:
        return self.pieces.get(piece)

    def save(self, piece: str, found: dict[str, Any]) -> None:
        assert piece not in self.pieces
        self.pieces[piece] = found


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    made = Workers()
    monkeypatch.setattr(stages, "Worker", made)
    yield made


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return load(write_toy(tmp_path), check=False)


def run(
    spec: Spec, options: MeasureOptions | None = None, *, edited: str | None = None, **more: Any
) -> Measured | Rejected | Unmeasured:
    return measure(spec, KernelSource(program_of(spec, TOY_KERNEL), edited=edited), options, **more)


def test_a_measurement_scores_in_processes_that_neither_tuned_nor_proved(
    spec: Spec, workers: Workers
) -> None:
    found = run(spec)
    assert isinstance(found, Measured), found
    assert [gate.gate for gate in found.gates] == ["numerics", "stability", "benchmark", "decision"]
    tuned, scored = workers.tasks("tune"), workers.tasks("score")
    assert [case for _, case in tuned] == ["large", "wide"]
    assert not any(job.afresh for job in workers.jobs)
    assert [case for _, case in scored] == ["large", "wide"] * 3
    assert len({worker for worker, _ in scored}) == 3 and {w for w, _ in tuned} == {0}
    assert not {w for w, _ in scored} & {w for w, _ in tuned}
    assert [held["case"] for held in found.controls] == ["large"] * 3
    itself = found.gates[2].figures["against_itself"]
    assert itself["low"] < 1 < itself["high"] < 1.05 and itself["detectable"] is not None
    large = found.timings[0]
    assert large.processes == 3 and len(large.samples["candidate"]) == 3
    assert len(large.samples["candidate"][0]) == large.rounds == MeasureOptions().rounds
    speedup = large.ratios["torch.compile"]
    assert speedup.low < 1.5 < speedup.high and speedup.detectable is not None
    assert 0 < speedup.detectable < 0.05
    assert large.milliseconds["torch.compile"] / large.milliseconds["candidate"] == pytest.approx(
        speedup.estimate, rel=5e-3
    )
    assert large.parts == {
        "gemm of step 0": pytest.approx(large.milliseconds["candidate"], rel=0.05),
        "vector of step 0": 0.01,
    }
    assert found.conditions["gpu"] == "NVIDIA H100" and len(found.controls) == 3
    assert found.protocol == PROTOCOL
    told = {name: seconds for name, seconds in found.seconds.items() if name.startswith("score: ")}
    assert told == {"score: inputs": 6, "score: rivals": 12, "score: race": 24}
    assert found.conditions["during"]["score/2/wide"] == {"sm_mhz": [1, 2, 3]}
    assert found.seeds["score/1/large/controlled.0/benchmark/0"] and found.seeds["tune/wide/tuning"] == 1


def test_a_time_is_compared_with_the_limits_of_its_own_gpu(tmp_path: Path, workers: Workers) -> None:
    thin = TOY.replace("N: 8192}", "N: 8192, bench: false}")
    thin = thin.replace("M: 4096, K: 4096, N: 4096", "M: 16384, K: 64, N: 8192")
    (path := tmp_path / "toy.yaml").write_text(thin)
    workers.gpu, workers.slowness = "NVIDIA H200", 0.8
    found = run(load(path, check=False))
    assert isinstance(found, Measured), found
    large = found.timings[0]
    on_h100 = 1e3 * roofline(program_of(load(path, check=False), TOY_KERNEL), large.sizes).limit
    assert large.roofline_milliseconds < large.milliseconds["candidate"] < on_h100


def test_what_was_not_read_of_the_gpu_is_a_finding(spec: Spec, workers: Workers) -> None:
    found = run(spec)
    assert isinstance(found, Measured), found
    (said,) = found.gates[2].findings
    assert found.gates[2].gate == "benchmark"
    assert "memory_mhz was not read; power_w was not read (during score/0/large/controlled.0, " in said


def test_a_sample_of_no_time_makes_a_measurement_void(spec: Spec, workers: Workers) -> None:
    def timed(given: Any) -> dict[str, Any]:
        found = workers.score(given)
        found["samples"]["torch.compile"][3] = 0.0
        return found

    workers.answers[score] = timed
    found = run(spec)
    assert isinstance(found, Unmeasured), found
    assert found.reason == "a timed call took 0.0 ms, which is not a duration: the measurement is wrong"


def test_proofs_cover_hidden_sizes_and_a_single_row_on_probes_and_on_what_was_tuned(
    spec: Spec, workers: Workers
) -> None:
    found = run(spec)
    assert isinstance(found, Measured)
    hidden = [job for job in workers.jobs if job.case.startswith("hidden")]
    assert {tuple(sorted(job.sizes.items())) for job in hidden}.isdisjoint(
        tuple(sorted(case.sizes.items())) for case in spec.cases
    )
    assert any(job.sizes["M"] == 1 for job in hidden)
    seen = [str(job.schedules) for job in hidden]
    assert any("tile_n=192" in s for s in seen) and any("tile_n=192" not in s for s in seen)
    assert {"ragged", "hidden", "hidden, one row", "large", "wide"} == found.gates[0].figures.keys()
    assert {job.families for job in hidden if job.sizes["M"] == 1} == {("integers",)}
    first = {str(job.sizes) for job in workers.jobs if job.case == "hidden"}
    workers.jobs.clear()
    run(spec)
    assert {str(job.sizes) for job in workers.jobs if job.case == "hidden"}.isdisjoint(first)


def test_what_was_kept_is_not_asked_for_again(spec: Spec, workers: Workers) -> None:
    memory, first = Memory(), 0

    def cut(given: Any) -> dict[str, Any]:
        nonlocal first
        first += 1
        if first == 4:
            raise KeyboardInterrupt
        return workers.score(given)

    workers.answers[score] = cut
    with pytest.raises(KeyboardInterrupt):
        run(spec, keep=memory)
    done = set(memory.pieces)
    workers.answers[score] = workers.score
    asked = len(workers.asked)
    whole = run(spec, keep=memory)
    assert isinstance(whole, Measured)
    # the time spent before the interruption counts, too
    assert "tune" in whole.seconds and whole.seconds["score: race"] == 6 * 4.0
    later = [(task, case) for each in workers.asked[asked:] for task, case in each]
    assert later == [("score", "wide"), ("score", "large"), ("score", "wide")]
    assert done < set(memory.pieces)
    fewer = len(workers.tasks("score"))
    assert isinstance(
        run(spec, MeasureOptions(rounds=15), keep=memory), Measured
    )  # a new number of rounds needs new scores
    assert len(workers.tasks("score")) == fewer + 6 and len(workers.tasks("tune")) == 2


def test_what_the_sanitizer_has_seen_it_is_not_shown_again(
    spec: Spec, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def sanitized(job: KernelCase) -> dict[str, int]:
        shown.append(job.case)
        if len(shown) == 2:
            raise KeyboardInterrupt
        return {"memcheck": 0, "racecheck": 0}

    monkeypatch.setattr("coda_agent.verifier.gpu.sanitizer.sanitized", sanitized)
    memory, options = Memory(), MeasureOptions(sanitize=True)
    with pytest.raises(KeyboardInterrupt):
        run(spec, options, keep=memory)
    found = run(spec, options, keep=memory)
    assert isinstance(found, Measured)
    assert shown == ["ragged", "hidden", "hidden", "hidden, one row"]
    (gate,) = (gate for gate in found.gates if gate.gate == "sanitizer")
    assert gate.figures == dict.fromkeys(["ragged", *shown[2:]], {"memcheck": 0, "racecheck": 0})


def test_a_process_that_does_not_find_what_was_planted_is_replaced_and_then_void(
    spec: Spec, workers: Workers
) -> None:
    workers.faults = iter([["a kernel timed against itself gave 1.0090"], [], [], []])
    found = run(spec)
    assert isinstance(found, Measured)
    told = [(held["process"], held["attempt"], bool(held["faults"])) for held in found.controls]
    assert told == [(0, 0, True), (0, 1, False), (1, 0, False), (2, 0, False)]
    assert [case for _, case in workers.tasks("score")] == ["large"] + ["large", "wide"] * 3
    assert len({worker for worker, _ in workers.tasks("score")}) == 4
    assert {t.processes for t in found.timings} == {3}
    workers.faults = itertools.repeat(["planted 2% came out at 0.1%"])
    void = run(spec)
    assert isinstance(void, Unmeasured) and void.reason == "process 0: planted 2% came out at 0.1%"
    assert [held["attempt"] for held in void.evidence["controls"]] == [0, 1, 2]


def test_a_lost_worker_rejects_the_candidate_and_the_gpu_is_looked_at(spec: Spec, workers: Workers) -> None:
    def lost(job: KernelCase) -> dict[str, Any]:
        raise Lost("illegal_address", "an illegal memory access was encountered")

    workers.answers[numerics] = lost
    found = run(spec)
    assert isinstance(found, Rejected)
    assert (found.gate, found.code) == ("numerics", "illegal_address")
    assert workers.tasks("clean") == [(2, "")]  # 0 was lost, and 1 was started for the scores
    workers.answers[clean] = lost
    void = run(spec)
    assert isinstance(void, Unmeasured) and "after the loss of a worker" in void.reason


@pytest.mark.parametrize(
    ("last", "code", "why"),
    [
        (f"case large: {PREPARES}torch.compile", "illegal_address", "case large: torch.compile was lost"),
        (f"case large: {PREPARES}QuACK matmul", "hung", "case large: QuACK matmul was lost"),
        (f"case large: {RACES}", "out_of_memory", "case large: the GPU's memory is too small for all arms"),
        (f"case large: {RACES}", "hung", None),
        ("case large", "out_of_memory", None),
    ],
)
def test_what_another_arm_lost_is_void_and_no_fault_of_the_kernels(
    spec: Spec, workers: Workers, last: str, code: str, why: str | None
) -> None:
    def lost(given: Any) -> dict[str, Any]:
        workers.progress("benchmark", last)
        raise Lost(code, "what it died of")

    workers.answers[score] = lost
    found = run(spec)
    if why is None:
        assert isinstance(found, Rejected) and (found.gate, found.code) == ("benchmark", code)
    else:
        assert isinstance(found, Unmeasured) and found.reason.startswith(why)
        assert found.reason.endswith("what it died of")


def test_what_a_task_finds_wrong_is_that_gates_rejection(spec: Spec, workers: Workers) -> None:
    def unstable(job: KernelCase) -> dict[str, Any]:
        raise Failed("unstable", "output 'c' differs between two runs")

    workers.answers[stability] = unstable
    found = run(spec)
    assert isinstance(found, Rejected) and (found.gate, found.code) == ("stability", "unstable")
    assert [g.gate for g in found.gates] == ["numerics"] and not workers.tasks("clean")


def test_a_change_is_timed_beside_the_kernel_that_it_has_to_beat(spec: Spec, workers: Workers) -> None:
    before = {case: {0: Schedule(swizzle=16)} for case in ("large", "wide")}
    raced = {"wide": {0: [Schedule(swizzle=4), Schedule(swizzle=2)]}}
    kept = Incumbent(KernelSource(program_of(spec, TOY_KERNEL)), before, raced)
    found = run(spec, kept=kept)
    assert isinstance(found, Measured)
    assert all(t.ratios["the kernel before"].low > 1.05 for t in found.timings)
    jobs = [job for job in workers.kept if job is not None]
    assert len(jobs) == len(workers.kept) == 6
    assert {(job.case, job.sizes["M"]) for job in jobs} == {("large", 4096), ("wide", 2048)}
    tuned = Schedule.from_json(SCHEDULE)  # what this measurement's tuning found for the incumbent
    assert all(job.schedules == ({0: tuned},) for job in jobs)
    assert {job.case: job.known for job in jobs} == {"large": {0: [Schedule(swizzle=16)]}} | raced
    assert [t.kept_schedules for t in found.timings] == [{"0": SCHEDULE}] * 2
    assert found.rival == kept.kernel.lowered.hash
    assert sorted(workers.tasks("tune")) == [(0, case) for case in ("large", "large", "wide", "wide")]
    assert [job.afresh for job in workers.jobs if not job.schedules] == [True] * 4  # no old search is reused
    workers.gain = 1.0
    slower = run(spec, kept=kept)
    assert isinstance(slower, Rejected) and slower.code == "no_faster"


def test_an_edit_is_raced_over_what_the_kernel_before_has_just_been(spec: Spec, workers: Workers) -> None:
    """Today's search may find schedules that the incumbent's report lacks. If only the incumbent ran on these
    schedules, the race would compare schedules instead of texts."""
    program = program_of(spec, TOY_KERNEL)
    today = [SCHEDULE | {"swizzle": 16}, SCHEDULE | {"cluster_m": 2, "cluster_n": 2, "split": True}]
    usual = workers.answers[tune]
    last = {"finalists": {"0": today}}
    workers.answers[tune] = lambda job: usual(job) | ({} if job.kernel.edited else last)
    before = Incumbent(KernelSource(program), {case: {0: Schedule()} for case in ("large", "wide")}, {})
    text = editable(program).replace("\n\n", "\n\n# edited\n", 1)
    assert isinstance(run(spec, kept=before, edited=text), Measured)
    tuned = [job for job in workers.jobs if not job.schedules]
    assert {job.case for job in tuned if job.kernel.edited} == {"large", "wide"}
    raced = [Schedule.from_json(schedule) for schedule in today]
    assert all(job.known == ({0: raced} if job.kernel.edited else {0: [Schedule()]}) for job in tuned)
    workers.answers[tune], workers.jobs = usual, []  # without a search, there are no finalists
    assert isinstance(run(spec, kept=before, edited=text), Measured)
    fixed = [job.known for job in workers.jobs if job.kernel.edited and not job.schedules]
    assert fixed == [{0: [Schedule.from_json(SCHEDULE)]}] * 2


def test_workers_that_were_started_ahead_are_used_and_none_is_left(spec: Spec, workers: Workers) -> None:
    ahead = [workers() for _ in range(5)]
    assert isinstance(run(spec, ahead=ahead), Measured)
    assert len(workers.asked) == 5 and {w for w, _ in workers.tasks("score")} == {1, 2, 3}
    assert all(worker.closed for worker in ahead)


def test_a_kernel_before_that_does_not_run_here_is_no_fault_of_the_change(
    spec: Spec, workers: Workers
) -> None:
    schedules = {case: {0: Schedule()} for case in ("large", "wide")}
    before = Incumbent(KernelSource(program_of(spec, TOY_KERNEL)), schedules, {})
    usual = workers.answers[tune]

    def refused(job: KernelCase) -> dict[str, Any]:
        if job.known:  # only the incumbent has known schedules
            raise Failed("no_schedule", "no schedule of Step0 runs")
        return usual(job)

    workers.answers[tune] = refused
    found = run(spec, kept=before)
    assert isinstance(found, Unmeasured)
    assert found.reason == "the kernel before could not be tuned: no schedule of Step0 runs"


def test_what_quack_ran_on_is_told_and_what_it_won_with_before_goes_along(
    spec: Spec, workers: Workers
) -> None:
    before = QuackTuned(gpu="a GPU", version="1", arms={MATMUL: (({"tile_m": 256},),)})
    found = run(spec, quack={"wide": before})
    assert isinstance(found, Measured)
    assert [race.quack for race in workers.races] == [None, before] * 3
    assert [t.quack for t in found.timings] == [{MATMUL: (({"tile_m": 128}, {"tile_m": 64}),)}] * 2
    told = found.quack()["large"]
    assert (told.gpu, told.arms) == ("NVIDIA H100", found.timings[0].quack)
    assert told.version == found.identity.versions["quack-kernels"]


def test_no_schedule_is_told_that_not_every_process_had(spec: Spec, workers: Workers) -> None:
    workers.chosen = iter([128, 128, 128, 256, 128, 128])  # 256: the case wide in process 1
    found = run(spec)
    assert isinstance(found, Measured) and not found.timings[1].quack
    assert found.quack().keys() == {"large"}


def test_a_measurement_that_goes_on_elsewhere_is_void(spec: Spec, workers: Workers) -> None:
    """A measurement that continues on another machine must not count. Its report would name the first
    machine for all processes."""
    keep = Memory()
    assert isinstance(run(spec, keep=keep), Measured)
    for name in [name for name in keep.pieces if name.startswith("score/2/")]:
        del keep.pieces[name]
    workers.gpu = "NVIDIA H200"
    found = run(spec, keep=keep)
    assert isinstance(found, Unmeasured)
    elsewhere = "it began on another machine (NVIDIA H100, 1; this one is NVIDIA H200, 1): start it again"
    assert found.reason == elsewhere


def test_pieces_of_another_protocol_are_no_part_of_a_measurement(
    spec: Spec, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Memory()
    monkeypatch.setattr(stages, "PROTOCOL", PROTOCOL - 1)
    assert isinstance(run(spec, keep=keep), Measured)
    monkeypatch.setattr(stages, "PROTOCOL", PROTOCOL)
    asked = len(workers.jobs)
    assert isinstance(run(spec, keep=keep), Measured)
    assert len(workers.jobs) == 2 * asked  # all proofs, tunings and scores run again


def test_the_parts_of_a_stage_are_no_stages() -> None:
    runner = stages.StageRunner(processes=3, progress=silent, keep=None, ahead=[])
    runner.seconds |= {"tune": 1.0, "score": 3.0, "score: race": 2.0}
    assert runner.share("tune") == 0.25


def test_slow_is_rejected_and_too_few_processes_accept_nothing(spec: Spec, workers: Workers) -> None:
    two = run(spec, MeasureOptions(processes=2))
    assert isinstance(two, Unmeasured) and "2 process(es)" in two.reason
    workers.speedup = 1.0
    slow = run(spec, MeasureOptions(processes=1))
    assert isinstance(slow, Rejected) and slow.code == "slow"


def test_a_planted_delay_that_could_be_none_is_not_found() -> None:
    same = Interval(1.0, 0.999, 1.001, 0.95, (0.999, 1.001), (0.999, 1.001))
    planted = Interval(1.02, 0.999, 1.04, 0.95, (0.999, 1.04), (1.0, 1.03))
    assert len(faults(same, planted)) == 1


def test_where_the_oracle_is_fast_a_case_meets_every_family(
    spec: Spec, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for few, families in ((math.inf, EVERY), (0, measuring.ROUTINE)):
        monkeypatch.setattr(measuring, "FEW_FLOPS", few)
        workers.jobs.clear()
        run(spec)
        met = {job.families for job in workers.jobs if job.case in ("large", "wide") and job.schedules}
        assert met == {families}


@pytest.mark.parametrize(
    ("same", "planted", "words"),
    [
        (1.0, 1.025, []),
        (1.008, 1.025, ["against itself"]),
        (1.0, 1.0, ["planted delay"]),
        (1.0, 1.08, ["planted delay"]),
    ],
)
def test_controls_judge_a_process(same: float, planted: float, words: list[str]) -> None:
    generator = random.Random(5)
    own = [1e-3 * generator.gauss(1, 0.001) for _ in range(40)]
    found = faults(ratio([same * x for x in own], own), ratio([planted * x for x in own], own))
    assert len(found) == len(words) and all(w in f for w, f in zip(words, found, strict=True))
