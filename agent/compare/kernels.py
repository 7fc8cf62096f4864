"""The kernels that a model wrote, as a comparison takes them: accepted ones, on the schedules they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from agent import accept
from agent.compare.results import ResultsError
from primitives.ir import Program, ProgramError
from primitives.lower import lower
from primitives.roofline import H100, Machine, roofline
from verifier.columns import EDITED, PROGRAM
from verifier.contest import Contender
from verifier.measure import Kept
from verifier.report import REPORT, Accepted
from verifier.spec import Spec


def contenders(spec: Spec, sizes: Mapping[str, int]) -> dict[str, Contender]:
    """An operator's accepted kernels by arm: as they were tuned at these sizes, or else to be tuned over what
    was good at the nearest."""
    found = {PROGRAM: accepted(spec, raw=False), EDITED: accepted(spec, raw=True)}
    return {arm: _contender(spec, kept, sizes) for arm, kept in found.items() if kept}


def accepted(spec: Spec, folder: Path = accept.KERNELS, *, raw: bool) -> Kept | None:
    """An operator's accepted kernel as it was tuned; None where there is none, or the text that was measured
    is not what these versions lower it to. Raises ResultsError for files that cannot be read."""
    paths = accept.files(spec.name, folder, raw=raw)
    if not all(path.exists() for path in paths):
        return None
    try:
        report = REPORT.validate_json(paths[-1].read_bytes())
        program = Program.from_json(paths[-2 if raw else 1].read_text(encoding="utf-8"), spec.signature())
    except (ValueError, ProgramError) as error:
        raise ResultsError(f"{paths[-1]}: {error}; accept that kernel again") from None
    text = paths[0].read_text(encoding="utf-8") if raw else ""
    if not isinstance(report, Accepted) or lower(program, text).hash != report.identity.lowered_hash:
        return None
    return Kept.of(program, report.timings, text)


def written(spec: Spec) -> Program:
    """The program that a model wrote for an operator, accepted or not yet."""
    path = accept.files(spec.name)[1]
    return Program.from_json(path.read_text(encoding="utf-8"), spec.signature())


def machine(ceilings: Mapping[str, float]) -> Machine:
    """An H100 that gives what was measured."""
    measured = {
        name: replace(getattr(H100, name), value=value, source="measured") for name, value in ceilings.items()
    }
    return replace(H100, **measured)


def _contender(spec: Spec, kept: Kept, sizes: Mapping[str, int]) -> Contender:
    cases = [case for case in spec.cases if case.name in kept.schedules]
    for case in cases:
        if dict(case.sizes) == dict(sizes):
            return Contender(kept.program, kept.raw, kept.schedules[case.name])
    work = roofline(kept.program, sizes).flops
    nearest = min(cases, key=lambda c: abs(math.log(roofline(kept.program, c.sizes).flops / work)))
    return Contender(kept.program, kept.raw, known=kept.finalists[nearest.name])
