"""Audit a report: recompute its claims from its own samples, by the gates' rules.

Anyone can edit a report's file. So every derived figure is recomputed, and everything that the protocol
demands must be present and within its limits. Times are in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.errors import first_fault
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import by_step
from coda_agent.primitives.target import TARGET
from coda_agent.verifier.audit.numerics_audit import ROUNDED, figures_of, proofs
from coda_agent.verifier.baselines.quack import admitted
from coda_agent.verifier.decision import PROCESSES, InvalidMeasurement, Rows, central, compared, decide
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.gpu.benchmark import FEWEST_SETS, faults
from coda_agent.verifier.gpu.telemetry import unread
from coda_agent.verifier.measure import DEFAULT_ARMS, RETRIES
from coda_agent.verifier.report import CANDIDATE, PROTOCOL, Accepted, Ratio, Timing
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.statistics import MIN_ROUNDS, Interval
from coda_agent.verifier.timing import FEWEST

# Fields that every schedule must have. Older reports lack fields that were added later.
TILE_FIELDS = {"tile_m", "tile_n", "pingpong"}


def _bounded(interval: Interval) -> Interval:
    if not all(abs(ratio) < 1e12 for ratio in (interval.low, interval.estimate, interval.high)):
        raise ValueError("not a ratio of two times")
    return interval


_Interval = Annotated[Interval, AfterValidator(_bounded)]


class _Control(BaseModel):
    """The controls in one attempt of a timing process. ``same``: the ratio between two timings of the
    candidate. ``planted``: the same ratio when one timing has a planted delay. ``faults``: the faults that
    the process found."""

    process: int
    case: str
    same: _Interval
    planted: _Interval
    faults: tuple[str, ...]


_CONTROLS = TypeAdapter(tuple[_Control, ...])


def unfounded(name: str, spec: Spec, program: Program, report: Accepted) -> list[str]:
    """Every claim that the report's figures do not support, and every requirement of the protocol that the
    report does not meet."""
    if report.protocol != PROTOCOL:
        said = f"is of protocol {report.protocol}" if report.protocol else "says no protocol"
        return [f"{name}: the report {said}; this version knows {PROTOCOL}: measure again, or update"]
    timings = _timings(name, spec, program, report)
    return [
        *_device(name, report),
        *timings,
        *_scheduled(name, program, report),
        *(() if timings else _decided(name, spec, program, report)),
        *_controls(name, spec, report),
        *proofs(name, spec, program, report),
    ]


def of_samples(timing: Timing, arm: str) -> Ratio | None:
    """Recompute the arm's ratio to the candidate from the samples; None if samples are missing, too few or
    invalid."""
    try:
        return compared(timing.samples[arm], timing.samples[CANDIDATE])
    except (KeyError, ValueError, InvalidMeasurement):  # samples are missing, too few, or not durations
        return None


def _device(name: str, report: Accepted) -> list[str]:
    gpu = str(report.conditions.get("gpu", "a GPU without a name"))
    wanted = TARGET.machine.gpu
    return [] if wanted in gpu else [f"{name}: it was measured on {gpu}, not on an {wanted}: measure there"]


# Timings


def _timings(name: str, spec: Spec, program: Program, report: Accepted) -> list[str]:
    """Check that each measured case was timed once, at its sizes, against every arm, and that the timing's
    figures follow from its samples."""
    arms = admitted(spec, DEFAULT_ARMS, beside_kept=report.identity.raw and bool(report.rival))
    wanted = {case.name: dict(case.sizes) for case in spec.cases if case.bench}
    machine = TARGET.on(report.conditions.get("gpu"))
    found = [
        f"{name}: the report has a timing of case {t.case}, which the spec does not measure: measure again"
        for t in report.timings
        if t.case not in wanted
    ]
    for case, sizes in wanted.items():
        timings = [t for t in report.timings if t.case == case]
        if len(timings) != 1:
            found.append(
                f"{name}: the report has {len(timings)} timings of case {case}, not one: measure again"
            )
            continue
        (timing,) = timings
        if timing.sizes != sizes:
            found.append(f"{name}: case {case} was measured at {timing.sizes}, not at {sizes}: measure again")
        place = f"{name}: case {case}"
        bound = round(roofline(program, sizes, machine).seconds * 1e3, 5)
        if timing.roofline_milliseconds != bound:
            told = timing.roofline_milliseconds
            found.append(f"{place} says a roofline of {told} ms, the program's is {bound}: measure again")
        found += [
            f"{place}{words}: measure again" for words in (*_arm_faults(timing, arms), *_sampled(timing))
        ]
    return found


def _scheduled(name: str, program: Program, report: Accepted) -> list[str]:
    """Check that each step has a valid schedule. If the program fixes a step's schedule, the step must have
    been timed with that schedule."""
    steps = {step.index for step in cut(program).gemms}
    told = [(t.case, s) for t in report.timings for s in (t.schedules, t.kept_schedules or t.schedules)]
    wrong = dict.fromkeys(case for case, each in told if not _schedules(each, steps))
    return [
        *(f"{name}: case {case}: it does not have one schedule per step: measure again" for case in wrong),
        *(
            f"{name}: case {t.case}: step {step} did not run on the program's schedule: measure again"
            for t in report.timings
            for step, schedule in program.schedule.items()
            if t.schedules.get(str(step)) != schedule.to_json()
        ),
    ]


def _schedules(told: Mapping[str, Any], steps: Collection[int]) -> bool:
    try:
        found = by_step(told)
    except (ProgramError, ValueError):
        return False
    return found.keys() == steps and all(fields.keys() >= TILE_FIELDS for fields in told.values())


def _arm_faults(t: Timing, arms: Sequence[str]) -> list[str]:
    """Faults in how a case was measured: a missing arm, no CUDA graph, a warm L2, or too few sets of
    inputs."""
    found = [f" was not measured against {arm}" for arm in arms if arm not in t.ratios]
    if t.graph_milliseconds is None:
        found.append(" was not measured in a CUDA graph")
    if not t.cold:
        found.append(" was measured from a warm L2")
    if t.input_sets < FEWEST_SETS:
        found.append(f" was measured on {t.input_sets} set(s) of inputs; it needs at least {FEWEST_SETS}")
    return found


def _sampled(t: Timing) -> list[str]:
    """Faults of one case's samples, or of the figures derived from them."""
    own = t.samples.get(CANDIDATE, ())
    rounds = [len(row) for row in own]
    found = []
    if t.processes != len(own) or len(own) < PROCESSES:
        found.append(
            f" says {t.processes} process(es) and has samples of {len(own)}; it needs at least {PROCESSES}"
        )
    if not rounds or t.rounds != min(rounds) or t.rounds < FEWEST:
        found.append(
            f" says {t.rounds} rounds and has {min(rounds, default=0)}; it needs at least {FEWEST} a process"
        )
    found += [
        f": its samples of {arm} and of the candidate differ in rounds"
        for arm, rows in t.samples.items()
        if [len(row) for row in rows] != rounds
    ]
    found += [
        f": its time of {arm} is not its samples' median"
        for arm in sorted(t.samples.keys() | t.milliseconds.keys())
        if t.milliseconds.get(arm) != _median(t.samples.get(arm, ()))
    ]
    for arm in sorted((t.samples.keys() | t.ratios.keys()) - {CANDIDATE}):
        ratio = of_samples(t, arm)
        if ratio is None or t.ratios.get(arm) != ratio:
            found.append(f": its ratio to {arm} does not follow from its samples")
    return found


def _median(rows: Rows) -> float:
    """The median as a report computes it; NaN if there are no samples."""
    try:
        return round(central(rows), 5)
    except (ValueError, ZeroDivisionError, InvalidMeasurement):  # samples are missing, or not durations
        return math.nan


def _decided(name: str, spec: Spec, program: Program, report: Accepted) -> list[str]:
    """Decide again on the report's timings, and check that the kernel is accepted with the same figures."""
    figures: dict[str, Any] = {}
    try:
        decide(spec, program, report.timings, figures, TARGET.on(report.conditions.get("gpu")))
    except Failed as failed:
        return [f"{name}: decided again, it is rejected: {failed.message}"]
    except InvalidMeasurement as void:
        return [f"{name}: decided again, it is invalid: {void}"]
    if figures != figures_of(report, "decision"):
        return [f"{name}: gate decision has other figures than its timings give: measure again"]
    return []


# Controls


def _controls(name: str, spec: Spec, report: Accepted) -> list[str]:
    """Check that each process timed every case, found the planted delay, and found no difference between two
    timings of the kernel."""
    processes = max((t.processes for t in report.timings), default=PROCESSES)
    try:
        controls = _CONTROLS.validate_python(report.controls)
    except ValidationError as error:
        return [f"{name}: the controls are invalid: {first_fault(error)}: measure again"]
    tried = [[c for c in controls if c.process == process] for process in range(processes)]
    if not all(tried) or sum(map(len, tried)) != len(controls):
        return [f"{name}: the controls are not those of {processes} processes: measure again"]
    words = [
        each
        for process, attempts in enumerate(tried)
        for each in (*_tested(process, attempts), *_scored(process, attempts[-1].case, spec, report))
    ]
    words += _against_itself(report, [attempts[-1] for attempts in tried])
    return [f"{name}: {each}: measure again" for each in words]


def _tested(process: int, attempts: list[_Control]) -> list[str]:
    """Check that a process's last attempt is valid, and that each earlier attempt is invalid."""
    *replaced, last = ([*c.faults, *faults(c.same, c.planted)] for c in attempts)
    found = [f"process {process}'s controls have faults: {'; '.join(last)}"] if last else []
    if not all(replaced) or len(replaced) > RETRIES:
        found.append(
            f"process {process} was replaced {len(replaced)} times, once without a fault, or too often"
        )
    if not all(_encloses(interval) for c in attempts for interval in (c.same, c.planted)):
        found.append(f"process {process}'s controls have an interval that is not around its estimate")
    return found


def _encloses(i: Interval) -> bool:
    """Whether the interval encloses its estimate and both methods' intervals (bootstrap and Student's t)."""
    lows, highs = zip(i.bootstrap, i.student, strict=True)
    return min(lows) == i.low <= i.estimate <= i.high == max(highs)


def _scored(process: int, control: str, spec: Spec, report: Accepted) -> list[str]:
    """Check that the process read clocks and power in every round of each case. The report holds these
    readings under the name ``score/PROCESS/CASE``. For the case with controls, ``/controlled.N`` follows,
    where N is the number of the attempt."""
    during = report.conditions.get("during")
    pieces: Mapping[str, Any] = during if isinstance(during, dict) else {}
    cases = [case.name for case in spec.cases if case.bench]
    found = [] if control in cases else [f"the controls of process {process} belong to no measured case"]
    for case in cases:
        score = f"score/{process}/{case}"
        controlled = f"{score}/controlled."
        named = [p for p in pieces if (p.startswith(controlled) if case == control else p == score)]
        if not named:
            found.append(f"the report lacks the GPU's state during {score}")
        elif why := _unread(pieces[max(named)], _rounds(report, case, process)):  # max: the last attempt
            found.append(f"clocks and power are not known during {max(named)}: {why}")
    return found


def _unread(seen: Any, rounds: int | None) -> str:
    why = unread(seen)
    if why or rounds is None or seen.get("readings") == rounds:
        return why
    return f"they were read {seen.get('readings')} times in {rounds} rounds"


def _rounds(report: Accepted, case: str, process: int) -> int | None:
    """The number of a process's rounds on a case. None if samples are missing; another check reports that
    fault."""
    rows = next((t.samples.get(CANDIDATE, ()) for t in report.timings if t.case == case), ())
    return len(rows[process]) if process < len(rows) else None


def _against_itself(report: Accepted, controls: Sequence[_Control]) -> list[str]:
    """Check that the benchmark gate's ratio between two timings of the kernel follows from the processes'
    controls. The ratio's interval also depends on the rounds of the controls. Reports do not contain these
    rounds, so the interval cannot be recomputed."""
    try:
        told = Ratio.model_validate(figures_of(report, "benchmark").get("against_itself"))
        made = compared(
            [[c.same.estimate] * MIN_ROUNDS for c in controls], [[1.0] * MIN_ROUNDS] * len(controls)
        )
    except ValidationError as error:
        return [f"gate benchmark does not say how the kernel did against itself: {first_fault(error)}"]
    except InvalidMeasurement:
        return ["the controls of a kernel against itself are not ratios"]
    agree = [(told.estimate, made.estimate), (told.detectable or 0.0, made.detectable or 0.0)]
    if any(not abs(a - b) <= ROUNDED for a, b in agree) or not told.low <= told.estimate <= told.high:
        return [
            f"gate benchmark says {told.estimate} [{told.low}, {told.high}] of the kernel against itself, "
            f"but its processes' controls give {made.estimate}"
        ]
    return []
