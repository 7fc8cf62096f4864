"""The gates that need a GPU: numerics, stability, benchmark, decision, for a program that was checked.

Never runs candidate source: it takes a Program. Inputs are drawn from fresh seeds after the program is
fixed; tuning uses other inputs than scoring.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from primitives.ir import Program, Schedule
from primitives.roofline import roofline
from verifier.report import Gate, Measured, Ratio, Rejected, Timing
from verifier.spec import Case, Spec
from verifier.verify import Failed, Gates, Progress, _silent, _Stop, identity, judge

if TYPE_CHECKING:
    import torch

    from primitives.launch import Plan

REPEATS = 8
GUARD = 4096  # bytes before and behind each output that must stay as they were
DEFAULT_ARMS = ("torch.compile", "cuBLAS matmul")


@dataclass
class _Session:
    """What a measurement gathers as it goes from case to case."""

    spec: Spec
    program: Program
    arms: Sequence[str]
    rounds: int
    seeds: dict[str, int] = field(default_factory=dict)
    errors: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    tuning: dict[str, float] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)


def measure(
    spec: Spec, program: Program, *, arms: Sequence[str] = DEFAULT_ARMS, rounds: int = 30, progress: Progress = _silent
) -> Measured | Rejected:
    """Run the GPU gates on every case of the spec. ``arms``: names of ``verifier.baselines.BASELINES``
    or ``QuACK library``; the decision needs torch.compile among them."""
    from verifier.timing import record_conditions

    gates, session = Gates(progress), _Session(spec, program, arms, rounds)
    try:
        with gates.gate("numerics") as figures:
            for case in spec.cases:
                progress("numerics", f"case {case.name}")
                _numerics(session, case)
            figures["outputs"] = session.errors
            figures["tuning_seconds"] = session.tuning
        with gates.gate("stability") as figures:
            for case in spec.cases:
                progress("stability", f"case {case.name}")
                _stability(session, case)
            figures |= {"repeats": REPEATS, "bitwise_equal": True}
        with gates.gate("benchmark") as figures:
            for case in spec.cases:
                if case.bench:
                    progress("benchmark", f"case {case.name}")
                    session.timings.append(_benchmark(session, case))
            conditions = record_conditions()
        with gates.gate("decision") as figures:
            _decide(session, figures)
    except _Stop as stop:
        return stop.rejected
    return Measured(
        identity=identity(spec, program), gates=tuple(gates.passed), timings=tuple(session.timings),
        conditions=conditions, seeds=session.seeds, date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _inputs(session: _Session, case: Case, purpose: str) -> dict[str, torch.Tensor]:
    """Fresh inputs; the seed is drawn now and recorded."""
    from verifier import numerics

    seed = session.seeds[f"{case.name}/{purpose}"] = secrets.randbits(48)
    return numerics.draw(session.spec, case.sizes, seed, device="cuda")


def _plan(session: _Session, case: Case) -> Plan:
    """The tuned plan of a case, made once; its tuning inputs are forgotten."""
    from primitives.launch import Plan, check_inputs
    from primitives.tune import tuned

    if case.name not in session.plans:
        inputs = _inputs(session, case, "tuning")
        start = time.monotonic()
        sizes = check_inputs(session.program, inputs)
        schedules = tuned(session.program, inputs, sizes) | session.program.schedule
        session.tuning[case.name] = round(time.monotonic() - start, 1)
        session.plans[case.name] = Plan(session.program, sizes, schedules)
    return session.plans[case.name]


def _numerics(session: _Session, case: Case) -> None:
    """Poisoned outputs, fp64 truth, the error gate; ragged cases also on the compile gate's schedules."""
    import torch

    from primitives.compile import PROBES
    from primitives.launch import Plan
    from verifier import numerics, reference

    plan = _plan(session, case)
    inputs = _inputs(session, case, "numerics")
    truth = reference.oracle(session.spec, inputs, case.sizes)
    yard = reference.yardstick(session.spec, inputs, case.sizes)
    plans = [plan]
    if not case.bench:
        plans += [Plan(session.program, case.sizes, {k: probe for k in plan.schedules}) for probe in PROBES]
    for each in plans:
        outputs = each.outputs()
        for tensor in outputs.values():
            tensor.fill_(float("nan"))
        each.run(inputs, outputs)
        torch.cuda.synchronize()
        errors = numerics.compare(session.spec, outputs, truth, yard)
        judge(errors, f"on the GPU, case {case.name}, schedule {_schedules(each)}")
    session.errors[case.name] = {
        e.name: {k: round(getattr(e, k), 4) for k in ("rms_ratio", "tile_ratio", "element_ratio")} for e in errors
    }


def _schedules(plan: Plan) -> dict[str, dict[str, Any]]:
    return {str(step): dict(schedule.to_json()) for step, schedule in plan.schedules.items()}


def _stability(session: _Session, case: Case) -> None:
    """Repeats bitwise equal from differently poisoned, guarded outputs; inputs untouched."""
    import torch

    plan = _plan(session, case)
    inputs = _inputs(session, case, "stability")
    before = {name: _fingerprint(t) for name, t in inputs.items()}
    first: dict[str, torch.Tensor] = {}
    for repeat in range(REPEATS):
        poison = 0xFF if repeat % 2 == 0 else 0x7B
        guarded = {name: _guarded(t, poison) for name, t in plan.outputs().items()}
        plan.run(inputs, {name: view for name, (_, view) in guarded.items()})
        torch.cuda.synchronize()
        for name, (buffer, view) in guarded.items():
            edges = torch.cat((buffer[:GUARD], buffer[-GUARD:]))
            if not bool((edges == poison).all()):
                raise Failed("out_of_bounds", f"case {case.name}: bytes beside output {name!r} were written")
            if repeat == 0:
                first[name] = view.clone()
            elif not torch.equal(_bits(first[name]), _bits(view)):
                raise Failed("unstable", f"case {case.name}: output {name!r} differs between two runs on the same "
                             "inputs: something is read that nothing wrote, or summed in no fixed order")
    changed = [name for name, t in inputs.items() if _fingerprint(t) != before[name]]
    if changed:
        raise Failed("inputs_written", f"case {case.name}: input(s) {', '.join(changed)} were changed by the kernel")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def _guarded(like: torch.Tensor, poison: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer with room before and behind, and the tensor in its middle."""
    import torch

    size = like.numel() * like.itemsize
    room = -(-size // 256) * 256
    buffer = torch.full((room + 2 * GUARD,), poison, dtype=torch.uint8, device=like.device)
    view = buffer[GUARD : GUARD + size].view(like.dtype).view(like.shape)
    return buffer, view


def _fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits, one of them weighted: any single change moves them."""
    import torch

    bits = _bits(tensor).flatten().to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) % 65521 + 1
    return int(bits.sum()), int((bits * weights).sum())


def _benchmark(session: _Session, case: Case) -> Timing:
    from verifier import statistics, timing

    plan = _plan(session, case)
    inputs = _inputs(session, case, "benchmark")
    outputs = plan.outputs()
    arms = [timing.Arm("candidate", lambda: plan.run(inputs, outputs))]
    arms += [_arm(name, session.spec, inputs, case.sizes) for name in session.arms]
    samples = timing.measure(arms, rounds=session.rounds, seed=secrets.randbits(32))
    own = samples["candidate"].seconds
    ratios = {}
    for name in session.arms:
        interval = statistics.ratio(samples[name].seconds, own)
        ratios[name] = Ratio(estimate=interval.estimate, low=interval.low, high=interval.high,
                             confidence=interval.confidence)
    return Timing(
        case=case.name,
        sizes=dict(case.sizes),
        schedules=_schedules(plan),
        milliseconds={name: round(s.median * 1e3, 5) for name, s in samples.items()},
        ratios=ratios,
        roofline_milliseconds=round(roofline(session.program, case.sizes).seconds * 1e3, 5),
        host_microseconds=round(timing.host_time(lambda: plan.run(inputs, outputs)) * 1e6, 2),
        tuning_seconds=session.tuning[case.name],
        rounds=session.rounds,
        samples={name: tuple(round(x * 1e3, 5) for x in s.seconds) for name, s in samples.items()},
    )


def _arm(name: str, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Any:
    from verifier import baselines, timing

    if name == "QuACK library":
        from verifier.quack_baseline import tuned_library

        return timing.Arm(name, tuned_library(spec, inputs, sizes))
    return baselines.arm(name, spec, inputs, sizes)


def _decide(session: _Session, figures: dict[str, Any]) -> None:
    threshold = session.spec.accept.speedup
    figures |= {"baseline": "torch.compile", "threshold": threshold}
    figures["speedup"] = {t.case: t.ratios["torch.compile"].model_dump() for t in session.timings}
    for t in session.timings:
        speedup = t.ratios["torch.compile"]
        if t.milliseconds["candidate"] < t.roofline_milliseconds:
            raise Failed("impossible", f"case {t.case}: {t.milliseconds['candidate']} ms is less than the "
                         f"{t.roofline_milliseconds} ms that the hardware allows: the measurement is wrong")
        if speedup.low <= threshold:
            raise Failed("slow", f"case {t.case}: {speedup.estimate:.3f}x torch.compile "
                         f"[{speedup.low:.3f}, {speedup.high:.3f}], but the lower bound must exceed {threshold}: "
                         f"{t.milliseconds['candidate']:.3f} ms against {t.milliseconds['torch.compile']:.3f} ms",
                         timings=[x.model_dump(exclude={"samples"}) for x in session.timings])


__all__ = ["DEFAULT_ARMS", "Gate", "Schedule", "measure"]
