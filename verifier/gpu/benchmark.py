"""On the GPU, in a worker: how long do a verified program and its rivals take? Tasks of ``worker``.

Each process draws inputs of its own, proves the candidate on them, times all arms interleaved, and compares
what the timed calls left with what was proved, to the bit. What a call is about to write is overwritten
before, outside of the clock, so that an answer which is there was made in the time that was taken.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from coda_agent.verifier import statistics, timing
from coda_agent.verifier.baselines.pytorch import CUBLAS
from coda_agent.verifier.decision import KEPT
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.checks import Job, Trial, poisoned_run, untouched
from coda_agent.verifier.gpu.fingerprint import Fingerprints, overwrite, words
from coda_agent.verifier.gpu.worker import report
from coda_agent.verifier.report import CANDIDATE, Config, QuackTuned

if TYPE_CHECKING:
    import torch

    from coda_agent.primitives.runtime.executable import Plan

LONGEST = 1.5  # seconds of rounds: clocks at the power limit swing within one
HOST_CALLS = 21  # each waits for the device, which a 70B model's kernel keeps for 17 ms
PART_ROUNDS = 12
GRAPH = "candidate in a CUDA graph"
FEWEST_SETS = 2  # of inputs, that take turns: no call finds in the L2 what the one before it read
MOST_SETS = 8  # each is proved by the fp64 oracle
SAME, LATE = "candidate again", "candidate and a planted delay"  # the controls
PREPARES, RACES = "prepares ", "races"  # what a worker says that it does, of a rival or of all arms
PLANTED = 0.02  # of the candidate's time: the delay that a process has to find
SAME_WITHIN = 0.005  # how far apart two runs of one kernel may lie
FOUND_WITHIN = (0.01, 0.04)  # a launch adds a microsecond or two to the delay itself

Tensors = Mapping[str, "torch.Tensor"]
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Race:
    """What to time beside the candidate, and how: so many rounds, fewer of long kernels. ``controlled``: with
    arms that show whether this process measures at all. ``kept``: the kernel that a change has to beat.
    ``quack``: what QuACK's arms were tuned to before."""

    arms: tuple[str, ...]
    rounds: int
    cold: bool = True
    controlled: bool = False
    kept: Job | None = None
    quack: QuackTuned | None = None


def score(given: tuple[Job, Race]) -> dict[str, Any]:
    """Milliseconds of every arm in every round at one case, with all that makes them believable."""
    job, race = given
    report("benchmark", f"case {job.case}")
    begun = time.monotonic()
    (plan,) = job.plans()
    sets = _Sets.drawn(job, plan)
    drawn = time.monotonic()
    arms = [sets.candidate(CANDIDATE)]
    rivals = [_prepared(name, job, partial(_rival, name, job, sets, race.quack)) for name in race.arms]
    arms += [arm for arm, _ in rivals]
    if race.kept is not None:
        arms.append(_prepared(KEPT, job, partial(_kept, race.kept, sets)))
    report("benchmark", f"case {job.case}: {RACES}")
    arms.append(_graphed(sets))
    if race.controlled:
        arms += _controls(sets)
    prepared = time.monotonic()
    samples, conditions = timed(arms, race.rounds, cold=race.cold)
    raced = time.monotonic()
    sets.compare()
    host = {a.name: timing.host_time(a.call, HOST_CALLS) for a in arms if a.name in (CANDIDATE, CUBLAS)}
    parts = _parts(sets, race.cold)
    told = time.monotonic()
    graph = samples.pop(GRAPH)
    controls = _judged(samples[CANDIDATE], samples.pop(SAME), samples.pop(LATE)) if race.controlled else {}
    return controls | {
        "samples": {name: milliseconds(s) for name, s in samples.items()},
        "host_microseconds": {name: round(seconds * 1e6, 2) for name, seconds in host.items()},
        "graph_milliseconds": round(graph.median * 1e3, 6),
        "parts": parts,
        "quack": {arm.name: finalists for arm, finalists in rivals if finalists},
        "input_sets": len(sets.inputs),
        "conditions": conditions,
        "seeds": {f"benchmark/{i}": seed for i, seed in enumerate(sets.seeds)},
        "seconds": {
            "inputs": drawn - begun,
            "rivals": prepared - drawn,
            "race": raced - prepared,
            "checks": told - raced,
        },
    }


def timed(
    arms: Sequence[timing.Arm], rounds: int, *, cold: bool = True, longest: float = LONGEST
) -> tuple[dict[str, timing.Samples], dict[str, Any]]:
    """What each arm took in rounds of at most ``longest`` seconds, and how the GPU fared meanwhile."""
    from coda_agent.verifier.gpu.telemetry import Monitor, device

    with Monitor() as monitor:
        samples = timing.measure(
            arms,
            rounds=rounds,
            longest=longest,
            cold=cold,
            seed=secrets.randbits(32),
            on_round=lambda done: monitor.sample(),
        )
        return samples, device() | monitor.summary()


def milliseconds(samples: timing.Samples) -> list[float]:
    """By round, as they are kept."""
    return [round(x * 1e3, 6) for x in samples.seconds]


def _parts(sets: _Sets, cold: bool) -> dict[str, float]:
    """Milliseconds of each part of the candidate by itself, for whoever wants to make it faster; nothing
    where it is one. Together they may take longer than the whole, whose launches overlap."""
    parts = sets.plan.parts
    if len(parts) == 1:
        return {}
    pairs = list(zip(sets.inputs, sets.outputs, strict=True))
    arms = []
    for kind, step in parts:
        calls = [partial(sets.plan.run_parts, [(kind, step)], *pair) for pair in pairs]
        arms.append(timing.Arm(f"{kind} of step {step}", rotating(calls)))
    samples = timing.measure(arms, rounds=PART_ROUNDS, warmup_seconds=0.1, cold=cold)
    return {name: round(s.median * 1e3, 6) for name, s in samples.items()}


def _controls(sets: _Sets) -> list[timing.Arm]:
    """The candidate against itself, and against itself with a planted delay: among the arms that they speak
    for, not in a race of their own."""
    seconds = timing.measure([sets.candidate("alone")], rounds=5, warmup_seconds=0.2)["alone"].median
    cycles = int(PLANTED * seconds * _cycles_per_second())
    return [sets.candidate(SAME), sets.candidate(LATE, after=partial(_spin, cycles))]


def _judged(own: timing.Samples, same: timing.Samples, late: timing.Samples) -> dict[str, Any]:
    """The verdict on this process, and ``again``: milliseconds of the candidate against itself, by round."""
    found = [statistics.ratio(control.seconds, own.seconds) for control in (same, late)]
    told = {"same": found[0].to_dict(), "planted": found[1].to_dict(), "faults": faults(*found)}
    return {"controls": told, "again": milliseconds(same)}


def faults(same: statistics.Interval, planted: statistics.Interval) -> list[str]:
    """Why a process with these controls is not to be believed; empty if it is."""
    low, high = FOUND_WITHIN
    found = []
    if abs(same.estimate - 1) > SAME_WITHIN:
        found.append(f"a kernel against itself came out at {same.estimate:.4f}, not within {SAME_WITHIN:.1%}")
    if not (planted.low > 1 and low <= planted.estimate - 1 <= high):
        found.append(
            f"a planted delay of {PLANTED:.0%} came out at {planted.estimate - 1:.2%} "
            f"[{planted.low - 1:.2%}, {planted.high - 1:.2%}]"
        )
    return found


@dataclass
class _Sets:
    """Sets of inputs to rotate through, and what the candidate made of each when it was proved."""

    job: Job
    plan: Plan
    seeds: list[int]
    inputs: list[Tensors]
    outputs: list[dict[str, torch.Tensor]]
    given: list[Fingerprints]  # of the inputs
    proved: list[Fingerprints]  # of the outputs

    @classmethod
    def drawn(cls, job: Job, plan: Plan) -> _Sets:
        """At least two sets, and together larger than the L2: no arm finds its operands there."""
        made = cls(job, plan, [], [], [], [], [])
        made._add()
        for _ in range(sets_wanted(made.inputs[0]) - 1):
            made._add()
        return made

    def _add(self) -> None:
        """One more set, through the error gate."""
        trial = Trial(self.job)
        fresh = poisoned_run(self.plan, trial.inputs)
        trial.judge(self.plan, fresh)
        self.seeds.append(trial.seed)
        self.inputs.append(trial.inputs)
        self.outputs.append(self.plan.in_place(trial.inputs))
        self.given.append(trial.drawn)
        self.proved.append(Fingerprints(fresh))

    def candidate(self, name: str, after: Callable[[], object] | None = None) -> timing.Arm:
        """The candidate on one set after the other."""
        calls = [partial(self.plan.run, i, o) for i, o in zip(self.inputs, self.outputs, strict=True)]
        if after is not None:
            calls = [partial(_both, call, after) for call in calls]
        return self.arm(name, calls, self.outputs)

    def arm(
        self,
        name: str,
        calls: Sequence[Callable[[], object]],
        outputs: Sequence[Tensors] | None = None,
    ) -> timing.Arm:
        """A call for each set, taking turns. Before each, the ``outputs`` that it is about to write are
        overwritten, and the candidate's workspace, where a kernel could keep what the next call finds; for an
        arm that has no outputs of ours, as much memory that nobody reads, so that every arm finds the GPU
        alike. Not so those of a kernel that updates an input, whose buffer has to keep what is there:
        ``compare`` has it run once more."""
        written = [{}] * len(calls) if self.updates else outputs or [self.spare] * len(calls)
        rows = [[words(t) for t in (*each.values(), self.plan.workspace)] for each in written]
        return timing.Arm(name, rotating(calls), rotating([partial(overwrite, row) for row in rows]))

    @property
    def updates(self) -> Mapping[str, str]:
        return self.plan.program.signature.updates

    @cached_property
    def spare(self) -> Tensors:
        """Memory as large as a set's outputs."""
        return self.plan.outputs()

    def compare(self) -> None:
        """Failed where the timed calls left other bits than the proved one, or changed an input. By then an
        update's buffer holds the sum of all calls: there one more call is compared, on the same inputs drawn
        again."""
        for index, proved in enumerate(self.proved):
            mine = {n: t for n, t in self.inputs[index].items() if n not in self.updates.values()}
            untouched(self.job, mine, self.given[index])
            left = self._again(index) if self.updates else self.outputs[index]
            differing = proved.differing(left)
            if differing:
                raise Failed(
                    "other_output",
                    f"case {self.job.case}: output(s) {', '.join(differing)} of timed calls differ from "
                    "those that were verified",
                )

    def _again(self, index: int) -> dict[str, torch.Tensor]:
        from coda_agent.verifier.numerics.inputs import draw

        self.inputs[index] = draw(self.job.spec, self.job.sizes, self.seeds[index], device="cuda")
        return poisoned_run(self.plan, self.inputs[index])


def _both(call: Callable[[], object], after: Callable[[], object]) -> None:
    call()
    after()


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One call that takes turns."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def _prepared(name: str, job: Job, make: Callable[[], _Made]) -> _Made:
    """An arm that is not the candidate's. What goes wrong meanwhile is not the candidate's doing, which has
    run to its end: the asker knows by what was said last."""
    import torch

    torch.cuda.synchronize()
    report("benchmark", f"case {job.case}: {PREPARES}{name}")
    return make()


def _rival(
    name: str, job: Job, sets: _Sets, known: QuackTuned | None
) -> tuple[timing.Arm, list[list[Config]]]:
    """An arm, and of QuACK's the finalists of its tuning."""
    from coda_agent.verifier.baselines import pytorch
    from coda_agent.verifier.baselines import quack as quack_baseline

    if name in quack_baseline.ARMS:
        found = quack_baseline.tuned(name, job.spec, sets.inputs, job.sizes, known)
        return sets.arm(name, found.calls), found.finalists
    return sets.arm(name, pytorch.calls(name, job.spec, sets.inputs, job.sizes)), []


def _kept(job: Job, sets: _Sets) -> timing.Arm:
    (plan,) = job.plans()
    outputs = [plan.in_place(i) for i in sets.inputs]
    calls = [partial(plan.run, i, o) for i, o in zip(sets.inputs, outputs, strict=True)]
    return sets.arm(KEPT, calls, outputs)


def _graphed(sets: _Sets) -> timing.Arm:
    """The candidate replayed from a CUDA graph, among the others: alone it would meet other clocks."""
    import torch

    replays = []
    for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sets.plan.run(inputs, outputs)
        replays.append(graph.replay)
    return sets.arm(GRAPH, replays, sets.outputs)


def sets_wanted(inputs: Tensors) -> int:
    """How many such sets to take turns with: at least two, and together larger than the L2."""
    import torch

    l2 = int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return min(MOST_SETS, max(FEWEST_SETS, -(-l2 // sum(t.numel() * t.itemsize for t in inputs.values()))))


def _spin(cycles: int) -> None:
    import torch

    torch.cuda._sleep(cycles)


def _cycles_per_second() -> float:
    """Of the counter that a spin waits for: two spins differ by their cycles alone, not by their launches."""
    short, long = 200_000, 1_200_000
    arms = [timing.Arm("short", partial(_spin, short)), timing.Arm("long", partial(_spin, long))]
    samples = timing.measure(arms, rounds=9, warmup_seconds=0.05, cold=False)
    return (long - short) / (samples["long"].median - samples["short"].median)
