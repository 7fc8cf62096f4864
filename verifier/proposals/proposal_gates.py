"""The gates of a proposed primitive: form, interpret and compile, and on a GPU also numerics and stability.

``verifier.proposals.proposal`` defines the primitive's meaning, and ``proposal_points`` judges outputs.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.probe_schedules import PROBES
from coda_agent.primitives.raw.arithmetic import Answer, Calls, answer
from coda_agent.primitives.raw.error import RawError
from coda_agent.verifier import verify
from coda_agent.verifier.gates import Failed, Gates, Progress, Stop, identity, silent
from coda_agent.verifier.gpu.checks import KernelCase, poisoned_run, stability
from coda_agent.verifier.proposals.proposal import SIZES, Proposal
from coda_agent.verifier.proposals.proposal_points import FAMILIES, draw, errors_of
from coda_agent.verifier.report import Checked, Measured, Measurement
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.stages import PATIENCE
from coda_agent.verifier.worker import Worker, report

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNMEASURED = "checked; only an H100 shows the error of its hardware functions"


def check(proposal: Proposal, spec: Spec, source: str, progress: Progress = silent) -> verify.Verdict:
    """Run the gates that need no GPU: the functions' form, their arithmetic in fp32, and a confined
    compilation."""
    # The tests have an audit hook for this event. The hook checks that the code runs only in confinement.
    sys.audit("coda_agent.verifier.verify.check_edited", source)
    gates = Gates(progress)
    program = proposal.program(spec)
    try:
        with gates.gate("form") as figures:
            form = _answer(proposal, source)
            kernel = KernelSource(program, edited=proposal.framed(spec, source, form.fast))
            figures["lines"] = source.count("\n")
        with gates.gate("interpret") as figures:
            _interpret(proposal, spec, source, figures)
        with gates.gate("compile") as figures:
            verify.compile_gate(spec, kernel, PROBES[:1], figures)
    except Stop as stop:
        return verify.Verdict(stop.rejected, None)
    made = Checked(identity=identity(spec, kernel), gates=tuple(gates.passed), unmeasured=UNMEASURED)
    return verify.Verdict(made, program)


def _answer(proposal: Proposal, source: str, calls: Calls = ()) -> Answer:
    try:
        return answer(source, proposal.name, len(proposal.arguments), calls)
    except RawError as error:
        raise Failed(error.code, error.message, error.line) from None


def _interpret(proposal: Proposal, spec: Spec, source: str, figures: dict[str, Any]) -> None:
    """Evaluate the functions, round the result of each operation to fp32, and judge the outputs."""
    drawn = {family: draw(proposal, family, secrets.randbits(48)) for family in FAMILIES}
    calls: list[tuple[bool, list[torch.Tensor]]] = []
    for inputs in drawn.values():
        first, *rest = (inputs[a] for a in proposal.arguments)
        calls += [(True, [inputs["left"].float() + first, *rest]), (False, [first, *rest])]
    found = _answer(proposal, source, calls)
    figures["worst_rms_ratio"] = {}
    for i, (family, inputs) in enumerate(drawn.items()):
        outputs = {"fused": found.values[2 * i].bfloat16()}
        if family != "accumulator":
            outputs["loaded"] = found.values[2 * i + 1]
        errors = errors_of(proposal, spec, inputs, outputs, f"its arithmetic, {family} arguments")
        figures["worst_rms_ratio"][family] = errors["fused"]


# On a GPU


@dataclass(frozen=True)
class PrimitiveCase(KernelCase):
    """The toy kernel that calls the proposed functions, with the schedules to check."""

    proposal: Proposal | None = None

    def draw(self, family: str = "usual", device: str = "cuda") -> tuple[int, dict[str, Tensor]]:
        assert self.proposal is not None
        seed = secrets.randbits(48)
        return seed, {n: t.to(device) for n, t in draw(self.proposal, family, seed).items()}


def numerics(job: PrimitiveCase) -> dict[str, Any]:
    """In a worker process, compare the kernel's outputs with fp64, on every family of points and with every
    schedule."""
    assert job.proposal is not None
    outputs: dict[str, dict[str, float]] = {}
    seeds: dict[str, int] = {}
    plans = job.plans()
    for family in job.families:
        report("numerics", f"{family} arguments")
        seeds[f"numerics/{family}"], inputs = job.draw(family)
        ran = [poisoned_run(plan, inputs) for plan in plans]
        for made in ran:
            if family == "accumulator":
                del made["loaded"]
            where = f"on the GPU, {family} arguments"
            errors = errors_of(job.proposal, job.spec, inputs, made, where)
            known = outputs.setdefault(family, {"rms_ratio": 0.0, "ulps": 0.0})
            known["rms_ratio"] = max(known["rms_ratio"], errors["fused"])
            known["ulps"] = max(known["ulps"], errors.get("ulps", 0.0))
    return {"outputs": outputs, "plans": len(plans), "seeds": seeds, "conditions": _conditions()}


def _conditions() -> dict[str, Any]:
    from coda_agent.verifier.gpu.telemetry import Monitor

    with Monitor() as monitor:
        monitor.sample()
        return monitor.summary()


def measure(
    proposal: Proposal, spec: Spec, source: str, progress: Progress = silent, worker: Worker | None = None
) -> Measurement:
    """Run the GPU gates on the toy kernel that calls the functions. Compare the kernel's outputs with fp64,
    and compare repeated runs bit for bit."""
    gates, program = Gates(progress), proposal.program(spec)
    schedules = tuple({0: probe} for probe in PROBES)
    seeds: dict[str, int] = {}
    with worker or Worker() as asked:
        try:
            with gates.gate("numerics") as figures:
                form = _answer(proposal, source)
                kernel = KernelSource(program, edited=proposal.framed(spec, source, form.fast))
                job = PrimitiveCase(spec, kernel, "frame", SIZES, schedules, FAMILIES, proposal=proposal)
                found = asked.ask(numerics, job, patience=PATIENCE, progress=progress)
                conditions = found.pop("conditions")
                seeds |= found.pop("seeds")
                figures["frame"] = found
            with gates.gate("stability") as figures:
                found = asked.ask(stability, job, patience=PATIENCE, progress=progress)
                seeds |= found.pop("seeds")
                figures["frame"] = found
        except Stop as stop:
            return stop.rejected
    return Measured(
        identity=identity(spec, kernel),
        gates=tuple(gates.passed),
        timings=(),
        conditions=conditions,
        seeds=seeds,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
