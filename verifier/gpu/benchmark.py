"""Time a verified program and its competitors (arms) on the GPU. ``score`` is the task that a ``worker``
runs.

Each process draws its own inputs, checks the candidate on them, and times all arms interleaved. It then
compares the outputs of the timed calls with the checked outputs, bit by bit. Before each call, outside the
measured time, the process overwrites the call's output memory. So a correct result must have been computed
within the measured time.
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
from coda_agent.verifier.gpu.checks import InputDraw, KernelCase, poisoned_run, untouched
from coda_agent.verifier.gpu.fingerprint import Fingerprints, overwrite, words
from coda_agent.verifier.report import CANDIDATE, Config, QuackTuned
from coda_agent.verifier.worker import report

if TYPE_CHECKING:
    import torch

    from coda_agent.primitives.runtime.executable import Plan

# Once ``timing.FEWEST`` rounds have run, no round begins after this many seconds. At the power limit, clock
# rates rise and fall about once in this time, so the rounds see both.
LONGEST = 1.5
# number of host timings; each one waits until the device is idle, and a kernel of a 70B model takes 17 ms
HOST_CALLS = 21
PART_ROUNDS = 12
GRAPH = "candidate in a CUDA graph"
FEWEST_SETS = 2  # with only one set of inputs, a call could find its inputs in the L2
MOST_SETS = 8  # limit on the sets, because each set is checked against the fp64 reference
SAME, LATE = "candidate again", "candidate and a planted delay"  # names of the control arms
PREPARES, RACES = "prepares ", "races"  # a worker's progress messages
PLANTED = 0.02  # the planted delay that a process must detect, as a fraction of the candidate's time
SAME_WITHIN = 0.005  # the largest relative difference allowed between two timings of the same kernel
# limits on the planted delay as measured; launching the delay adds one or two microseconds
FOUND_WITHIN = (0.01, 0.04)

Tensors = Mapping[str, "torch.Tensor"]
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Benchmark:
    """The arms to time besides the candidate, and the number of rounds. Long kernels get fewer rounds.
    ``controlled``: add the control arms, which show whether this process measures correctly. ``kept``: the
    incumbent that a change has to beat. ``quack``: known schedules of QuACK's arms."""

    arms: tuple[str, ...]
    rounds: int
    cold: bool = True
    controlled: bool = False
    kept: KernelCase | None = None
    quack: QuackTuned | None = None


def score(given: tuple[KernelCase, Benchmark]) -> dict[str, Any]:
    """Time every arm on one case; return the milliseconds of every round, and the results of the checks on
    these timings."""
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
        arms.append(_prepared(KEPT, job, partial(_incumbent_arm, race.kept, sets)))
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
    controls = (
        _controls_verdict(samples[CANDIDATE], samples.pop(SAME), samples.pop(LATE)) if race.controlled else {}
    )
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
    """Time the arms. Once ``timing.FEWEST`` rounds have run, no round begins after ``longest`` seconds.
    Return each arm's samples, and the GPU's telemetry."""
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
    """The milliseconds of each round, as reports store them."""
    return [round(x * 1e3, 6) for x in samples.seconds]


def _parts(sets: _Sets, cold: bool) -> dict[str, float]:
    """The milliseconds of each part of the candidate when the part runs alone; empty for a candidate of one
    part. These times help authors to make the candidate faster. The parts may add up to more than the whole
    candidate's time, because the candidate's launches overlap."""
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
    """The control arms: the candidate again, and the candidate with a planted delay. Both are timed
    interleaved with the other arms."""
    seconds = timing.measure([sets.candidate("alone")], rounds=5, warmup_seconds=0.2)["alone"].median
    cycles = int(PLANTED * seconds * _cycles_per_second())
    return [sets.candidate(SAME), sets.candidate(LATE, after=partial(_spin, cycles))]


def _controls_verdict(own: timing.Samples, same: timing.Samples, late: timing.Samples) -> dict[str, Any]:
    """The controls' ratios and the faults that they show. ``again`` in the result: the milliseconds of the
    repeated candidate, by round."""
    found = [statistics.ratio(control.seconds, own.seconds) for control in (same, late)]
    told = {"same": found[0].to_dict(), "planted": found[1].to_dict(), "faults": faults(*found)}
    return {"controls": told, "again": milliseconds(same)}


def faults(same: statistics.Interval, planted: statistics.Interval) -> list[str]:
    """The reasons why these controls make a process invalid; empty if the process is valid."""
    low, high = FOUND_WITHIN
    found = []
    if abs(same.estimate - 1) > SAME_WITHIN:
        found.append(f"a kernel timed against itself gave {same.estimate:.4f}, not within {SAME_WITHIN:.1%}")
    if not (planted.low > 1 and low <= planted.estimate - 1 <= high):
        found.append(
            f"a planted delay of {PLANTED:.0%} was measured as {planted.estimate - 1:.2%} "
            f"[{planted.low - 1:.2%}, {planted.high - 1:.2%}]"
        )
    return found


@dataclass
class _Sets:
    """The sets of inputs that calls rotate through, and the candidate's checked outputs on each set."""

    job: KernelCase
    plan: Plan
    seeds: list[int]
    inputs: list[Tensors]
    outputs: list[dict[str, torch.Tensor]]
    given: list[Fingerprints]  # fingerprints of the inputs
    proved: list[Fingerprints]  # fingerprints of the outputs

    @classmethod
    def drawn(cls, job: KernelCase, plan: Plan) -> _Sets:
        """Draw at least two sets of inputs. If ``MOST_SETS`` allows, draw as many sets as together exceed the
        L2, so that no arm finds its operands in the L2."""
        made = cls(job, plan, [], [], [], [], [])
        made._add()
        for _ in range(sets_wanted(made.inputs[0]) - 1):
            made._add()
        return made

    def _add(self) -> None:
        """Draw one more set, and check the candidate's outputs on this set by the error gate."""
        trial = InputDraw(self.job)
        fresh = poisoned_run(self.plan, trial.inputs)
        trial.judge(self.plan, fresh)
        self.seeds.append(trial.seed)
        self.inputs.append(trial.inputs)
        self.outputs.append(self.plan.in_place(trial.inputs))
        self.given.append(trial.drawn)
        self.proved.append(Fingerprints(fresh))

    def candidate(self, name: str, after: Callable[[], object] | None = None) -> timing.Arm:
        """An arm that runs the candidate on one set of inputs after another."""
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
        """An arm with one call per set of inputs, in rotation.

        Before each call, the outputs of that call are overwritten. The candidate's workspace is overwritten
        too, because a kernel could hide results in the workspace for the next call. For an arm that allocates
        its own outputs, the same amount of unused memory is overwritten, so that all arms find the GPU in the
        same state. If an output updates an input, only the workspace is overwritten, because the input's
        buffer must keep its content. For such a kernel, ``compare`` checks the result of one more run.
        """
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
        """Raise Failed if the outputs of the timed calls differ in any bit from those of the checked call, or
        if an input has changed. If an output updates an input, the input's buffer now holds the updates of
        all calls. In that case the same inputs are drawn again from their seed, and the output of one more
        run is compared."""
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
    """A function that makes one of these calls per invocation, in rotation."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def _prepared(name: str, job: KernelCase, make: Callable[[], _Made]) -> _Made:
    """Report the stage, then prepare an arm other than the candidate. The candidate has already run, so a
    failure here is not the candidate's fault."""
    import torch

    torch.cuda.synchronize()
    report("benchmark", f"case {job.case}: {PREPARES}{name}")
    return make()


def _rival(
    name: str, job: KernelCase, sets: _Sets, known: QuackTuned | None
) -> tuple[timing.Arm, list[list[Config]]]:
    """Return an arm other than the candidate. For an arm of QuACK, also return the schedules of its last
    tuning round."""
    from coda_agent.verifier.baselines import pytorch
    from coda_agent.verifier.baselines import quack as quack_baseline

    if name in quack_baseline.ARMS:
        found = quack_baseline.tuned_calls(name, job.spec, sets.inputs, job.sizes, known)
        return sets.arm(name, found.calls), found.finalists
    return sets.arm(name, pytorch.calls(name, job.spec, sets.inputs, job.sizes)), []


def _incumbent_arm(job: KernelCase, sets: _Sets) -> timing.Arm:
    (plan,) = job.plans()
    outputs = [plan.in_place(i) for i in sets.inputs]
    calls = [partial(plan.run, i, o) for i, o in zip(sets.inputs, outputs, strict=True)]
    return sets.arm(KEPT, calls, outputs)


def _graphed(sets: _Sets) -> timing.Arm:
    """An arm that runs the candidate in a CUDA graph. The arm is timed among the other arms, because the GPU
    would have other clock rates if the arm ran alone."""
    import torch

    replays = []
    for inputs, outputs in zip(sets.inputs, sets.outputs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sets.plan.run(inputs, outputs)
        replays.append(graph.replay)
    return sets.arm(GRAPH, replays, sets.outputs)


def sets_wanted(inputs: Tensors) -> int:
    """The number of input sets: at least two and at most MOST_SETS. If possible, all sets together are larger
    than the L2."""
    import torch

    l2 = int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return min(MOST_SETS, max(FEWEST_SETS, -(-l2 // sum(t.numel() * t.itemsize for t in inputs.values()))))


def _spin(cycles: int) -> None:
    import torch

    torch.cuda._sleep(cycles)


def _cycles_per_second() -> float:
    """The frequency of the counter that ``_spin`` reads, in Hz. The time of a short spin is subtracted from
    the time of a long spin, so that the launch times cancel."""
    short, long = 200_000, 1_200_000
    arms = [timing.Arm("short", partial(_spin, short)), timing.Arm("long", partial(_spin, long))]
    samples = timing.measure(arms, rounds=9, warmup_seconds=0.05, cold=False)
    return (long - short) / (samples["long"].median - samples["short"].median)
