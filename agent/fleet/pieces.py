"""The pieces of work that slots (cores and GPUs) run: examine a source, compile a program, measure a kernel.

Each piece is a task of ``verifier.worker``: a function that takes plain data and returns JSON. Python
that an author wrote runs only in the sandbox, as everywhere in this project.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import by_step
from coda_agent.verifier.report import Gate, Rejected
from coda_agent.verifier.spec.file import of_text
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.worker import Worker, report

STAGE = "stage"  # a progress message with this gate name carries a finished stage of a measurement


def spec_of(text: str) -> Spec:
    """Parse a spec's text. The spec was checked before, so its reference is not run again."""
    return of_text(Path("spec.yaml"), text, Spec, lambda spec: None)


def examine(asked: dict[str, Any]) -> dict[str, Any]:
    """Pass a source through the gates that come before the compiler. The answer has either the report of a
    rejection (``rejected``), or the traced program with its source lines and passed gates."""
    from coda_agent.verifier import verify

    spec = spec_of(asked["spec"])
    found = verify.examine(
        spec,
        asked["source"],
        schedules=by_step(asked["schedules"]),
        weak_jail=asked["weak_jail"],
        progress=report,
    )
    if isinstance(found, Rejected):
        return {"rejected": found.model_dump(mode="json")}
    return {
        "program": found.program.to_json(),
        "lines": found.lines,
        "gates": [gate.model_dump(mode="json") for gate in found.gates],
    }


def compile_program(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the compile gate on a program that ``examine`` returned. The answer has either the report of a
    rejection (``rejected``) or the passed gate (``gate``)."""
    from coda_agent.verifier import verify

    spec = spec_of(asked["spec"])
    gates = tuple(map(Gate.model_validate, asked["gates"]))
    found = verify.Examined(
        Program.from_json(asked["program"], spec.signature()), tuple(asked["lines"]), gates
    )
    verdict = verify.compile_examined(spec, found, progress=report)
    if isinstance(verdict.report, Rejected):
        return {"rejected": verdict.report.model_dump(mode="json")}
    return {"gate": verdict.report.gates[-1].model_dump(mode="json")}


class _Stages:
    """A store of a measurement's finished stages, for use on the slot. ``load`` returns a stage that an
    earlier, interrupted measurement finished. ``save`` sends a new stage to the driver, which stores it."""

    def __init__(self, known: dict[str, dict[str, Any]]):
        self._known = known

    def load(self, piece: str) -> dict[str, Any] | None:
        return self._known.get(piece)

    def save(self, piece: str, found: dict[str, Any]) -> None:
        report(STAGE, json.dumps([piece, found]))


_ahead: list[Worker] = []  # this slot's workers for the next measurement, which already import modules


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure a bundle's entry on this slot's GPU, and lock the GPU against other coda-agent commands."""
    from coda_agent.agent.artifacts import bundle, bundle_measuring
    from coda_agent.agent.storage.gpu_lock import gpu_alone
    from coda_agent.verifier.stages import start_workers

    entry = bundle.PackedKernel.model_validate(asked["entry"])
    here = [worker for worker in _ahead if worker.alive]
    _ahead[:] = start_workers()
    try:
        with gpu_alone(lambda words: report("benchmark", words)):
            found = bundle_measuring.measure_entry(
                Path(asked["place"]), entry, asked["options"], _Stages(asked["stages"]), report, here
            )
    finally:
        for worker in here:
            worker.close()
    return found.model_dump(mode="json")
