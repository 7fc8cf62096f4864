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
from typing import TYPE_CHECKING, Any, Protocol

from primitives.ir import Program
from primitives.roofline import roofline
from verifier.report import CaseResult, Gate, Measured, Ratio, Rejected, Timing
from verifier.spec import Case, Spec
from verifier.verify import Failed, Gates, Progress, _silent, _Stop, identity, judge

if TYPE_CHECKING:
    import torch

    from primitives.launch import Plan
    from primitives.tune import Known

REPEATS = 8
HOST_CALLS = 50
GUARD = 4096  # bytes before and behind each output that must stay as they were
BASELINE = "torch.compile"
DEFAULT_ARMS = (BASELINE, "cuBLAS matmul")


@dataclass
class _Session:
    """One case under measurement."""

    spec: Spec
    program: Program
    case: Case
    gates: Gates
    known: Known
    seeds: dict[str, int] = field(default_factory=dict)


def measure(
    spec: Spec,
    program: Program,
    *,
    arms: Sequence[str] = DEFAULT_ARMS,
    rounds: int = 30,
    progress: Progress = _silent,
    keep: Keep | None = None,
    known: Mapping[str, Known] | None = None,
) -> Measured | Rejected:
    """Run the GPU gates on every case of the spec. ``arms``: names of ``verifier.baselines.BASELINES``
    or ``verifier.quack_baseline.ARMS``, which are left out where QuACK has no epilogue for the spec; the
    decision needs torch.compile among them. ``keep`` holds finished cases, so that a measurement that was
    cut off goes on. ``known``: by case and step, schedules worth racing."""
    from verifier.quack_baseline import admitted
    from verifier.timing import record_conditions

    gates, arms = Gates(progress), admitted(spec, arms)
    results: list[CaseResult] = []
    try:
        for case in spec.cases:
            result = keep.load(case.name) if keep else None
            if result is None:
                result = _measure_case(
                    _Session(
                        spec, program, case, Gates(progress, case.name), (known or {}).get(case.name, {})
                    ),
                    arms,
                    rounds,
                )
                if keep:
                    keep.save(result)
            results.append(result)
        gates.passed += _merged(results)
        with gates.gate("decision") as figures:
            _decide(spec, program, results, figures)
    except _Stop as stop:
        return stop.rejected
    return Measured(
        identity=identity(spec, program),
        gates=tuple(gates.passed),
        timings=tuple(r.timing for r in results if r.timing),
        conditions=record_conditions(),
        seeds={f"{r.case}/{purpose}": seed for r in results for purpose, seed in r.seeds.items()},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class Keep(Protocol):
    """Where finished cases are kept."""

    def load(self, case: str) -> CaseResult | None: ...
    def save(self, result: CaseResult) -> None: ...


def _measure_case(session: _Session, arms: Sequence[str], rounds: int) -> CaseResult:
    import torch

    case, gates = session.case, session.gates
    with gates.gate("numerics") as figures:
        plan, tuning_seconds = _plan(session)
        figures |= {"outputs": _numerics(session, plan), "tuning_seconds": tuning_seconds}
    with gates.gate("stability") as figures:
        _stability(session, plan)
        figures |= {"repeats": REPEATS}
    timing = None
    if case.bench:
        with gates.gate("benchmark"):
            timing = _benchmark(session, plan, arms, rounds, tuning_seconds)
    del plan
    torch.cuda.empty_cache()
    return CaseResult(case=case.name, gates=tuple(gates.passed), timing=timing, seeds=session.seeds)


def _merged(results: list[CaseResult]) -> list[Gate]:
    """One entry a gate, from all cases."""
    merged = []
    for name in ("numerics", "stability", "benchmark"):
        found = {r.case: g for r in results for g in r.gates if g.gate == name}
        figures = {case: gate.figures for case, gate in found.items()}
        merged.append(
            Gate(gate=name, seconds=round(sum(g.seconds for g in found.values()), 1), figures=figures)
        )
    return merged


def _inputs(session: _Session, purpose: str, family: str = "normal") -> dict[str, torch.Tensor]:
    """Fresh inputs; the seed is drawn now and recorded."""
    from verifier.inputs import draw

    seed = session.seeds[purpose] = secrets.randbits(48)
    return draw(session.spec, session.case.sizes, seed, device="cuda", family=family)


def _plan(session: _Session) -> tuple[Plan, float]:
    """The tuned plan of the case, and the seconds that tuning took; its inputs are forgotten."""
    from primitives.launch import Kernel

    inputs = _inputs(session, "tuning")
    start = time.monotonic()
    plan = Kernel(session.program, known=session.known).plan(inputs)
    return plan, round(time.monotonic() - start, 1)


def _numerics(session: _Session, plan: Plan) -> dict[str, Any]:
    """Poisoned outputs, fp64 truth, the error gate, over all families of inputs; a ragged case also on
    the schedules of the compile gate."""
    from primitives.compile import PROBES
    from primitives.launch import Plan
    from verifier import numerics, reference
    from verifier.inputs import FAMILIES

    spec, case = session.spec, session.case
    plans = [plan]
    if not case.bench:
        admitted = [p for p in PROBES if all(g.admits(p, case.sizes) for g in plan.lowered.gemms)]
        plans += [Plan(session.program, case.sizes, {k: probe for k in plan.schedules}) for probe in admitted]
    worst: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        inputs = _inputs(session, f"numerics/{family}", family)
        truth = reference.oracle(spec, inputs, case.sizes)
        yard = reference.yardstick(spec, inputs, case.sizes)
        for each in plans:
            errors = numerics.compare(spec, _poisoned_run(each, inputs), truth, yard)
            judge(errors, f"on the GPU, case {case.name}, inputs {family!r}, schedule {_schedules(each)}")
            for e in errors:
                known = worst.setdefault(e.name, {})
                for key in ("rms_ratio", "tile_ratio", "element_ratio"):
                    known[key] = max(known.get(key, 0.0), round(getattr(e, key), 4))
    return worst


def _poisoned_run(plan: Plan, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    outputs = plan.outputs()
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    plan.run(inputs, outputs)
    torch.cuda.synchronize()
    return outputs


def _schedules(plan: Plan) -> dict[str, dict[str, Any]]:
    return {str(step): dict(schedule.to_json()) for step, schedule in plan.schedules.items()}


def _stability(session: _Session, plan: Plan) -> None:
    """Repeats bitwise equal from differently poisoned, guarded outputs; inputs untouched."""
    import torch

    case = session.case
    inputs = _inputs(session, "stability")
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
                raise Failed(
                    "unstable",
                    f"case {case.name}: output {name!r} differs between two runs on the same "
                    "inputs: something is read that nothing wrote, or summed in no fixed order",
                )
    _updated_alike(case.name, plan, inputs, first)
    changed = [name for name, t in inputs.items() if _fingerprint(t) != before[name]]
    if changed:
        raise Failed(
            "inputs_written", f"case {case.name}: input(s) {', '.join(changed)} were changed by the kernel"
        )


def _updated_alike(
    case: str, plan: Plan, inputs: Mapping[str, torch.Tensor], first: Mapping[str, torch.Tensor]
) -> None:
    """An output that is written over its input's buffer is what it is in a buffer of its own."""
    import torch

    updates = plan.program.signature.updates
    if not updates:
        return
    own = {name: t.clone() if name in updates.values() else t for name, t in inputs.items()}
    outputs = plan.in_place(own)
    plan.run(own, outputs)
    torch.cuda.synchronize()
    differing = [name for name in updates if not torch.equal(_bits(outputs[name]), _bits(first[name]))]
    if differing:
        raise Failed(
            "update", f"case {case}: output(s) {', '.join(differing)} differ when written over their input"
        )


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


def _benchmark(
    session: _Session, plan: Plan, names: Sequence[str], rounds: int, tuning_seconds: float
) -> Timing:
    from primitives.tune import finalists
    from verifier import statistics, timing

    case, inputs = session.case, _inputs(session, "benchmark")
    outputs = plan.in_place(inputs)
    arms = [timing.Arm("candidate", lambda: plan.run(inputs, outputs))]
    arms += [_arm(name, session.spec, inputs, case.sizes) for name in names]
    samples = timing.measure(arms, rounds=rounds, seed=secrets.randbits(32))
    own = samples["candidate"].seconds
    ratios = {}
    for name in names:
        interval = statistics.ratio(samples[name].seconds, own)
        ratios[name] = Ratio(
            estimate=interval.estimate, low=interval.low, high=interval.high, confidence=interval.confidence
        )
    return Timing(
        case=case.name,
        sizes=dict(case.sizes),
        schedules=_schedules(plan),
        milliseconds={name: round(s.median * 1e3, 5) for name, s in samples.items()},
        ratios=ratios,
        roofline_milliseconds=round(roofline(session.program, case.sizes).seconds * 1e3, 5),
        host_microseconds={
            arm.name: round(timing.host_time(arm.call, HOST_CALLS) * 1e6, 2)
            for arm in arms
            if arm.name in ("candidate", "cuBLAS matmul")
        },
        tuning_seconds=tuning_seconds,
        finalists={
            str(step): tuple(dict(s.to_json()) for s in raced)
            for step, raced in finalists(session.program, case.sizes).items()
        },
        rounds=rounds,
        samples={name: tuple(round(x * 1e3, 5) for x in s.seconds) for name, s in samples.items()},
    )


def _arm(name: str, spec: Spec, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> Any:
    from verifier import baselines, quack_baseline, timing

    if name in quack_baseline.ARMS:
        return timing.Arm(name, quack_baseline.tuned_library(spec, inputs, sizes, name))
    return baselines.arm(name, spec, inputs, sizes)


def _decide(spec: Spec, program: Program, results: list[CaseResult], figures: dict[str, Any]) -> None:
    threshold = spec.accept.speedup
    rows = [r.timing for r in results if r.timing]
    figures |= {"baseline": BASELINE, "threshold": threshold, "speedup": {}}
    for t in rows:
        kind = "speedup" if spec.case(t.case).decides else "reported"
        figures.setdefault(kind, {})[t.case] = t.ratios[BASELINE].model_dump()
    for t in rows:
        speedup = t.ratios[BASELINE]
        limit = roofline(program, t.sizes).limit * 1e3
        if t.milliseconds["candidate"] < limit:
            raise Failed(
                "impossible",
                f"case {t.case}: {t.milliseconds['candidate']} ms is less than the {limit:.5f} ms that the "
                "hardware allows: the measurement is wrong",
            )
        if spec.case(t.case).decides and speedup.low <= threshold:
            raise Failed(
                "slow",
                f"case {t.case}: {speedup.estimate:.3f}x {BASELINE} "
                f"[{speedup.low:.3f}, {speedup.high:.3f}], but the lower bound must exceed {threshold}: "
                f"{t.milliseconds['candidate']:.3f} ms against {t.milliseconds[BASELINE]:.3f} ms",
                timings=[x.model_dump(exclude={"samples"}) for x in rows],
            )
