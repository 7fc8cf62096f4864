"""Decide on a measurement: compute ratios with confidence intervals, then accept the kernel, reject it, or
declare the measurement invalid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.target import TARGET, Machine
from coda_agent.verifier import statistics
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.report import CANDIDATE, Ratio, Timing
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.timing import FEWEST

BASELINE = "torch.compile"
KEPT = "the kernel before"  # the arm of the incumbent, which a change has to beat
NO_FASTER = "no_faster"  # the error code of a change that is rejected because it is not faster
# in every case, the lower bound of a change's speed may be less than the incumbent's speed by this fraction
MAY_LOSE = 0.01
# number of processes that an acceptance needs; fewer do not show the variation between processes
PROCESSES = 3

Rows = Sequence[Sequence[float]]  # samples of one arm, by process and round
Pairs = Sequence[tuple[Sequence[float], Sequence[float]]]  # samples of two arms, by process


class InvalidMeasurement(Exception):
    """The measurement is invalid; ``evidence`` shows why."""

    def __init__(self, reason: str, **evidence: Any):
        super().__init__(reason)
        self.evidence = evidence


def compared(arm: Rows, candidate: Rows) -> Ratio:
    """The ratio of an arm's time to the candidate's time, with a confidence interval over processes. With
    only one process the interval is over rounds; such an interval is not enough to accept a kernel. Raises
    InvalidMeasurement for a sample that is not a duration, and ValueError for too few or unpaired samples."""
    pairs = _paired(arm, candidate)
    found = statistics.of_pairs(pairs)
    least = round(statistics.detectable(pairs), 5) if len(pairs) > 1 else None
    fields = (found.estimate, found.low, found.high)
    estimate, low, high = (round(value, 5) for value in fields)
    return Ratio(estimate=estimate, low=low, high=high, confidence=found.confidence, detectable=least)


def no_slower(kept: Rows, change: Rows) -> bool:
    """Whether a change is as fast as the incumbent. Student's t interval of the speed ratio must reach 1. The
    bootstrap's interval is not used for this test, because it is too narrow with three processes. Both
    intervals must also lie above ``1 - MAY_LOSE``, so that noise cannot hide a slower kernel."""
    found = statistics.of_pairs(_paired(kept, change))
    return found.student[1] >= 1 and found.low > 1 - MAY_LOSE


def _paired(arm: Rows, candidate: Rows) -> Pairs:
    _durations((*arm, *candidate))
    return list(zip(arm, candidate, strict=True))


def central(rows: Rows) -> float:
    """The geometric mean of the processes' medians. Raises InvalidMeasurement for a sample that is not a
    duration."""
    _durations(rows)
    return math.exp(sum(math.log(median(row)) for row in rows) / len(rows))


def _durations(rows: Rows) -> None:
    wrong = [x for row in rows for x in row if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise InvalidMeasurement(
            f"a timed call took {wrong[0]} ms, which is not a duration: the measurement is wrong"
        )


def decide(
    spec: Spec,
    program: Program,
    rows: tuple[Timing, ...],
    figures: dict[str, Any],
    machine: Machine = TARGET.machine,
) -> None:
    """Check a measurement by the rules of acceptance, and fill in ``figures``. Raise Failed if, on a case
    that decides, the lower bound of the speedup does not exceed the threshold. Also raise Failed if a change
    does not beat the incumbent. Raise InvalidMeasurement if a time is shorter than ``machine`` allows, or if
    the measurement is too weak for an acceptance: it has too few processes or rounds, or a warm L2."""
    threshold = spec.accept.speedup
    figures |= {"baseline": BASELINE, "threshold": threshold, "speedup": {}}
    for t in rows:
        kind = "speedup" if spec.case(t.case).decides else "reported"
        figures.setdefault(kind, {})[t.case] = t.ratios[BASELINE].model_dump()
    for t in rows:
        _believable(program, t, machine)
        speedup = t.ratios[BASELINE]
        if spec.case(t.case).decides and speedup.low <= threshold:
            raise Failed(
                "slow",
                f"case {t.case}: {speedup.estimate:.3f}x {BASELINE} "
                f"[{speedup.low:.3f}, {speedup.high:.3f}], but the lower bound must exceed {threshold}: "
                f"{t.milliseconds[CANDIDATE]:.3f} ms against {t.milliseconds[BASELINE]:.3f} ms",
                timings=[x.model_dump(exclude={"samples"}) for x in rows],
            )
    _improvement(rows)
    for t in rows:
        if t.processes < PROCESSES or t.rounds < FEWEST or not t.cold:
            raise InvalidMeasurement(
                f"case {t.case}: {t.processes} process(es), {t.rounds} rounds, "
                f"{'cold' if t.cold else 'warm'} L2: to accept, measure in at least {PROCESSES} processes, "
                f"with at least {FEWEST} rounds each and a cold L2",
                timings=[x.model_dump(exclude={"samples"}) for x in rows],
            )


def _improvement(rows: Sequence[Timing]) -> None:
    """Raise Failed if a change may be slower than the incumbent in some case, or is faster in no case."""
    ratios = {t.case: t.ratios[KEPT] for t in rows if KEPT in t.ratios}
    samples = {t.case: (t.samples[KEPT], t.samples[CANDIDATE]) for t in rows if KEPT in t.ratios}
    slower = [case for case, both in samples.items() if not no_slower(*both)]
    if ratios and (slower or not any(r.low > 1 for r in ratios.values())):
        told = ", ".join(f"{c}: {r.estimate:.3f}x [{r.low:.3f}, {r.high:.3f}]" for c, r in ratios.items())
        may = f"it is slower, or may be by more than {MAY_LOSE:.0%}, on {', '.join(slower)}"
        why = may if slower else "no case is faster beyond doubt"
        words = f"not kept, because {why}; its speed relative to {KEPT}: {told}"
        raise Failed(NO_FASTER, words, timings=[x.model_dump(exclude={"samples"}) for x in rows])


def _believable(program: Program, t: Timing, machine: Machine) -> None:
    """Raise InvalidMeasurement if the candidate's median time in any process, or its time in a CUDA graph, is
    shorter than ``machine`` allows. Each process counts, because a mean over processes could hide such a
    time."""
    limit = roofline(program, t.sizes, machine).limit * 1e3
    times = {f"process {n}: ": median(row) for n, row in enumerate(t.samples[CANDIDATE])}
    if t.graph_milliseconds is not None:
        times["in a CUDA graph: "] = t.graph_milliseconds
    for place, seen in times.items():
        if seen < limit:
            raise InvalidMeasurement(
                f"case {t.case}: {place}{seen:.6g} ms is less than the {limit:.5f} ms that the "
                f"{machine.name} allows: the measurement is wrong"
            )
