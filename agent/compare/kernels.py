"""The kernels that a model wrote, as a comparison takes them: accepted ones, on the schedules they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from agent import accept
from primitives.ir import Program
from primitives.lower import lower
from primitives.roofline import H100, Machine, roofline
from verifier.columns import EDITED, PROGRAM
from verifier.contest import Contender
from verifier.kept import Kept
from verifier.spec import Spec


def contenders(spec: Spec, sizes: Mapping[str, int]) -> dict[str, Contender]:
    """An operator's accepted kernels by arm: as they were tuned at these sizes, or else to be tuned over what
    was good at the nearest."""
    found = {PROGRAM: tuned(spec, raw=False), EDITED: tuned(spec, raw=True)}
    return {arm: _contender(spec, kept, sizes) for arm, kept in found.items() if kept}


def tuned(spec: Spec, *, raw: bool) -> Kept | None:
    """An operator's accepted kernel as it was tuned; None where there is none, or the text that was measured
    is not what these versions lower it to. Raises KernelError."""
    found = accept.read(spec, raw=raw)
    if found is None or lower(found.program, found.raw).hash != found.report.identity.lowered_hash:
        return None
    return Kept.of(found.program, found.report.timings, found.raw)


def written(spec: Spec) -> Program:
    """The program that a model wrote for an operator, accepted or not yet."""
    with accept.settled(spec.name) as (_, program, *_):
        return Program.from_json(program.read_text(encoding="utf-8"), spec.signature())


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
