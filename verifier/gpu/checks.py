"""GPU tasks that check whether a program is always correct. A ``worker`` runs the tasks.

A task takes a ``KernelCase`` and returns figures, or raises Failed with the candidate's mistake. Inputs come
from fresh seeds, drawn after the program is fixed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.schedule import Schedule, schedules_json
from coda_agent.verifier.gates import Failed, judge
from coda_agent.verifier.gpu import guards
from coda_agent.verifier.gpu.fingerprint import Fingerprints
from coda_agent.verifier.gpu.guards import POISONS, Guarded
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.worker import report

if TYPE_CHECKING:
    import torch

    from coda_agent.primitives.runtime.executable import Plan
    from coda_agent.verifier.numerics.error_gate import OutputError

REPEATS = 20

Schedules = Mapping[int, Schedule]


@dataclass(frozen=True)
class KernelCase:
    """A kernel at the sizes of one case, with one or more choices of schedules. Each choice has one schedule
    per step."""

    spec: Spec
    kernel: KernelSource
    case: str
    sizes: Mapping[str, int]
    schedules: tuple[Schedules, ...] = ()
    families: tuple[str, ...] = ("normal",)
    seed: int | None = None  # of the inputs; by default a fresh one for each draw
    known: Mapping[int, Sequence[Schedule]] | None = None  # for tuning: good schedules to time
    afresh: bool = False  # for tuning: ignore earlier results

    def plans(self) -> list[Plan]:
        """One plan per choice of schedules; the plans share a workspace. Raises Failed if one of the
        program's schedules does not fit these sizes."""
        from coda_agent.primitives.runtime.executable import Plan
        from coda_agent.primitives.runtime.launchable import LaunchError

        made: list[Plan] = []
        for chosen in self.schedules:
            room = made[0].workspace if made else None
            try:
                made.append(Plan(self.kernel.on(chosen), self.sizes, "cuda", room))
            except LaunchError as error:
                raise Failed("schedule", f"case {self.case}: {error}") from None
        return made

    def draw(self, family: str = "normal", device: str = "cuda") -> tuple[int, dict[str, torch.Tensor]]:
        """Draw inputs; return their seed and the inputs."""
        from coda_agent.verifier.numerics.inputs import draw

        seed = secrets.randbits(48) if self.seed is None else self.seed
        return seed, draw(self.spec, self.sizes, seed, device=device, family=family)


class InputDraw:
    """Fresh inputs of one family (a distribution of values). The fp64 truth is computed only after a kernel
    has run. Otherwise a kernel that reads out of bounds could find the truth in the GPU's memory."""

    def __init__(self, job: KernelCase, family: str = "normal"):
        self.job, self.family = job, family
        self.seed, self.inputs = job.draw(family)
        self.drawn = Fingerprints(self.inputs)

    @cached_property
    def truth(self) -> dict[str, torch.Tensor]:
        """The true outputs, in fp64. Raises Failed if the inputs have changed since they were drawn."""
        from coda_agent.verifier.numerics import reference

        untouched(self.job, self.inputs, self.drawn)
        return reference.oracle(self.job.spec, self.inputs, self.job.sizes)

    @cached_property
    def yardstick(self) -> dict[str, torch.Tensor]:
        from coda_agent.verifier.numerics import reference

        return reference.yardstick(self.job.spec, self.inputs, self.job.sizes)

    @cached_property
    def exact(self) -> frozenset[str]:
        """Outputs that must be bit-exact."""
        from coda_agent.verifier.numerics import exactness, reference

        if self.family != "integers":
            return frozenset()
        found = reference.fp32(self.job.spec, self.inputs, self.job.sizes)
        return exactness.exact_outputs(found, self.truth)

    @cached_property
    def undefined(self) -> dict[str, float]:
        """The outputs for which the reference itself overflows, cancels or loses too much precision, each
        with a magnitude. The gate ignores the errors of such an output if no value exceeds its magnitude."""
        from coda_agent.verifier.numerics import error_gate, reference

        def jittered() -> dict[str, torch.Tensor]:
            return reference.jittered(self.job.spec, self.inputs, self.job.sizes)

        return error_gate.undefined(self.family, self.truth, self.yardstick, jittered)

    def judge(self, plan: Plan, outputs: Mapping[str, torch.Tensor]) -> Sequence[OutputError]:
        """Judge a plan's outputs by the error gate; return their errors. Raises Failed if an output exceeds
        the limits."""
        from coda_agent.verifier.numerics import error_gate, limits

        allowed = limits.of_stored(self.family)
        found = error_gate.compare(self.job.spec, outputs, self.truth, self.yardstick, allowed, self.exact)
        errors = error_gate.counted(found, outputs, self.undefined)
        schedule = schedules_json(plan.schedules)
        where = f"on the GPU, {_place(self.job)}, inputs {self.family!r}, schedule {schedule}"
        judge(errors, where, {"sizes": dict(self.job.sizes), "family": self.family, "seed": self.seed})
        return errors


def tune(job: KernelCase) -> dict[str, Any]:
    """Tune a kernel; return the fastest schedules by step, all schedules of the last round, and the seconds
    that tuning took. A cached result is reused unless the job is ``afresh``. The inputs are discarded,
    because the benchmark draws its own inputs."""
    from coda_agent.primitives.runtime.launchable import LaunchError
    from coda_agent.primitives.runtime.tune import NoSchedule, finalists, tuned_schedules

    start = time.monotonic()
    seed, inputs = job.draw()
    try:
        chosen = tuned_schedules(job.kernel, inputs, job.sizes, job.known, afresh=job.afresh)
    except (LaunchError, NoSchedule) as error:
        raise Failed("no_schedule", f"case {job.case}: {error}") from None
    return {
        "schedules": schedules_json(chosen),
        "finalists": {
            str(step): [dict(s.to_json()) for s in raced]
            for step, raced in finalists(job.kernel, job.sizes).items()
        },
        "seconds": round(time.monotonic() - start, 1),
        "seeds": {"tuning": seed},
    }


def numerics(job: KernelCase) -> dict[str, Any]:
    """Compare outputs with the fp64 truth by the error gate, for every family of inputs on every plan (the
    kernel with one choice of schedules). The outputs hold NaN before each run.

    Stretched inputs go beyond the typical values. Other limits apply to stretched inputs, so their figures
    are separate, under ``beyond``.
    """
    from coda_agent.verifier.numerics.stretch import STRETCHED

    plans = job.plans()
    typical: dict[str, dict[str, float]] = {}
    beyond: dict[str, dict[str, float]] = {}
    seeds: dict[str, int] = {}
    for family in job.families:
        report("numerics", f"case {job.case}, inputs {family!r}")
        seeds[f"numerics/{family}"], errors = _errors_on_draw(job, plans, family)
        for error in errors:
            known = (beyond if family in STRETCHED else typical).setdefault(error.name, {})
            for key in ("rms_ratio", "tile_ratio", "element_ratio"):
                known[key] = max(known.get(key, 0.0), round(getattr(error, key), 4))
    figures = {"outputs": typical, "families": list(job.families), "plans": len(plans), "seeds": seeds}
    return figures | ({"beyond": beyond} if beyond else {})


def _errors_on_draw(job: KernelCase, plans: Sequence[Plan], family: str) -> tuple[int, list[OutputError]]:
    """Draw inputs once, and judge every plan on them; return the seed and the errors. The tensors are freed
    before the next draw."""
    trial = InputDraw(job, family)
    ran = [(plan, poisoned_run(plan, trial.inputs)) for plan in plans]
    return trial.seed, [error for plan, outputs in ran for error in trial.judge(plan, outputs)]


def stability(job: KernelCase) -> dict[str, Any]:
    """Check on every plan that repeated runs give bitwise equal outputs. Before each run, the outputs and the
    workspace are filled with one of two poison values. Inputs must not change. A kernel must not write
    outside its tensors, and the bytes outside its tensors must not affect results."""
    report("stability", f"case {job.case}")
    seed, drawn = job.draw()
    inputs = Guarded.holding(drawn, POISONS[0])
    del drawn  # the inputs of a case may take gigabytes
    for plan in job.plans():
        _repeat(job, plan, inputs)
    return {"repeats": REPEATS, "plans": len(job.schedules), "seeds": {"stability": seed}}


def launch(job: KernelCase) -> dict[str, Any]:
    """Run every plan once for a sanitizer. Apart from copies, nothing else runs on the GPU. In particular the
    reference does not run, because the sanitizer would also report hazards in cuBLAS."""
    import torch

    seed, drawn = job.draw(device="cpu")
    inputs = {name: t.cuda() for name, t in drawn.items()}
    for plan in job.plans():
        plan.run(inputs, plan.outputs())
    torch.cuda.synchronize()
    return {"seeds": {"sanitizer": seed}}


def clean(_: object) -> dict[str, Any]:
    """After a worker is lost, check that the GPU computes a small matmul correctly; return the free bytes."""
    import torch

    ones = torch.ones(256, 256, device="cuda")
    if not bool((ones @ ones == 256).all()):
        raise Failed("device_error", "the GPU computes a wrong matmul result: reset the GPU")
    return {"free_bytes": torch.cuda.mem_get_info()[0]}


def _place(job: KernelCase) -> str:
    return f"case {job.case}" if job.case in {c.name for c in job.spec.cases} else f"sizes {dict(job.sizes)}"


def poisoned_run(plan: Plan, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fill the outputs and the workspace with NaN, run a plan, and return its outputs."""
    import torch

    outputs = plan.outputs()
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    plan.workspace.fill_(POISONS[0])
    plan.run(inputs, outputs)
    torch.cuda.synchronize()
    return outputs


def _repeat(job: KernelCase, plan: Plan, inputs: Guarded) -> None:
    import torch

    before = Fingerprints(inputs.tensors)
    first: dict[str, torch.Tensor] = {}
    for repeat in range(REPEATS):
        poison = POISONS[repeat % 2]
        outputs = Guarded(plan.outputs(), poison)
        inputs.poison(poison)
        plan.workspace.fill_(poison)
        plan.run(inputs.tensors, outputs.tensors)
        torch.cuda.synchronize()
        _within_bounds(job, plan, inputs, outputs, poison)
        for name, view in outputs.tensors.items():
            if repeat == 0:
                first[name] = view.clone()
            elif not torch.equal(bits(first[name]), bits(view)):
                raise Failed(
                    "unstable",
                    f"{_place(job)}: output {name!r} differs between two runs on the same inputs: "
                    "it reads memory that nothing wrote, or sums in varying order",
                )
    _updated_alike(job, plan, inputs.tensors, first)
    untouched(job, inputs.tensors, before)


def _within_bounds(job: KernelCase, plan: Plan, inputs: Guarded, outputs: Guarded, poison: int) -> None:
    """Raise Failed if a run writes outside a tensor, or into gaps of the workspace."""
    beside = [f"outside output {name!r}" for name in outputs.written_beside(poison)]
    beside += [f"outside input {name!r}" for name in inputs.written_beside(poison)]
    beside += [] if guards.untouched(plan.gaps, poison) else ["into gaps of the workspace"]
    if beside:
        raise Failed("out_of_bounds", f"{_place(job)}: the kernel wrote {', '.join(beside)}")


def untouched(job: KernelCase, inputs: Mapping[str, torch.Tensor], before: Fingerprints) -> None:
    """Raise Failed if inputs have changed."""
    changed = before.differing(inputs)
    if changed:
        raise Failed("inputs_written", f"{_place(job)}: input(s) {', '.join(changed)} were changed")


def _updated_alike(
    job: KernelCase, plan: Plan, inputs: Mapping[str, torch.Tensor], first: Mapping[str, torch.Tensor]
) -> None:
    """Check that an output written over its input equals the output written to a separate buffer."""
    import torch

    updates = plan.program.signature.updates
    if not updates:
        return
    own = {name: t.clone() if name in updates.values() else t for name, t in inputs.items()}
    outputs = plan.in_place(own)
    plan.run(own, outputs)
    torch.cuda.synchronize()
    differing = [name for name in updates if not torch.equal(bits(outputs[name]), bits(first[name]))]
    if differing:
        raise Failed(
            "update", f"{_place(job)}: output(s) {', '.join(differing)} differ when written over their input"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers, in which NaN equals itself."""
    import torch

    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
