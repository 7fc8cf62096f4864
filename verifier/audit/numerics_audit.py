"""Check that a report's figures of numerics and stability cover every case, and are within the error gate's
limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.errors import first_fault
from coda_agent.primitives.lang.ir import Program
from coda_agent.verifier.gpu.checks import REPEATS
from coda_agent.verifier.measure import FEW_FLOPS, ROUTINE, SINGLE_ROW
from coda_agent.verifier.numerics.sizes import TILE, hidden
from coda_agent.verifier.numerics.stretch import STRETCHED
from coda_agent.verifier.report import Accepted
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.rules import HIDDEN, ONE_ROW

# tolerance when rounded figures are compared: those of numerics, and ratios of timings
ROUNDED = 1e-4

_Read = TypeVar("_Read", bound=BaseModel)
_Statistic = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Errors(BaseModel):
    """The ratios of one output's error to the error of the yardstick (the reference in fp32). Each number is
    the largest ratio over all families of inputs and all schedules."""

    rms_ratio: _Statistic
    tile_ratio: _Statistic
    element_ratio: _Statistic


class _Proved(BaseModel):
    """One case's figures in the numerics gate. ``beyond``: the figures of stretched inputs, without outputs
    that the gate could not judge on such inputs. ``plans``: how many times the kernel was planned, each time
    with other schedules."""

    outputs: dict[str, _Errors]
    beyond: dict[str, _Errors] = {}
    families: tuple[str, ...]
    plans: Annotated[int, Field(ge=1)]


class _Steady(BaseModel):
    """One case's figures in the stability gate. ``repeats``: how often the gate repeated the kernel.
    ``plans``: how many times the kernel was planned, each time with other schedules."""

    repeats: int
    plans: int


def proofs(name: str, spec: Spec, program: Program, report: Accepted) -> list[str]:
    """Return the faults in the figures of the numerics and stability gates. Both gates must have run on every
    case and on the hidden (random) sizes. The numerics gate must have used all required families of inputs.
    The stability gate must have made all required repeats, on as many choices of schedules as the numerics
    gate."""
    sizes = {case.name: dict(case.sizes) for case in spec.cases}
    seeds = {size: report.seeds.get(f"hidden/{size}") for size in (HIDDEN, ONE_ROW)}
    missing = [size for size, seed in seeds.items() if seed is None]
    if missing:
        return [f"{name}: the report has no seed of sizes {', '.join(missing)}: measure again"]
    rows = {HIDDEN: None, ONE_ROW: 1}
    sizes |= {size: hidden(spec, seed, rows=rows[size]) for size, seed in seeds.items() if seed is not None}
    found = []
    for case, at in sizes.items():
        found += [f"{name}: {words}: measure again" for words in _proof(spec, program, report, case, at)]
    return found


def _proof(spec: Spec, program: Program, report: Accepted, case: str, sizes: dict[str, int]) -> list[str]:
    try:
        proved = _of_case(report, "numerics", case, _Proved.model_validate)
        steady = _of_case(report, "stability", case, _Steady.model_validate)
    except _Lacking as lacking:
        return [str(lacking)]
    found = []
    if proved.families != (wanted := _families(spec, program, case, sizes)):
        found.append(
            f"gate numerics tried case {case} on {', '.join(proved.families) or 'no family'} of inputs, "
            f"not on {', '.join(wanted)}"
        )
    if proved.outputs.keys() != spec.outputs.keys():
        found.append(f"gate numerics has figures of other outputs than the spec's for case {case}")
    elif not proved.beyond.keys() <= spec.outputs.keys() or (
        not proved.beyond and not STRETCHED.keys().isdisjoint(proved.families)
    ):
        found.append(f"gate numerics has no figures of stretched inputs for case {case}")
    else:
        found += _excesses(spec, proved, case, sizes)
    if steady.repeats != REPEATS or steady.plans != proved.plans:
        found.append(
            f"gate stability repeated case {case} {steady.repeats} times on {steady.plans} choices of "
            f"schedules, not {REPEATS} times on {proved.plans}"
        )
    return found


class _Lacking(Exception):
    """A case's figures are missing from a gate, or invalid."""


def _of_case(report: Accepted, gate: str, case: str, read: Callable[[Any], _Read]) -> _Read:
    try:
        return read(figures_of(report, gate)[case])
    except KeyError:
        raise _Lacking(f"gate {gate} has no figures for case {case}") from None
    except ValidationError as error:
        raise _Lacking(f"gate {gate} has no figures for case {case}: {first_fault(error)}") from None


def _families(spec: Spec, program: Program, case: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """The families of inputs on which the numerics gate runs a case. A large case or a single row has fewer
    families."""
    from coda_agent.verifier.numerics.inputs import EVERY

    if case == ONE_ROW:
        return SINGLE_ROW
    large = any(c.bench for c in spec.cases if c.name == case) and roofline(program, sizes).flops > FEW_FLOPS
    return ROUTINE if large else EVERY


def _excesses(spec: Spec, proved: _Proved, case: str, sizes: dict[str, int]) -> list[str]:
    """The outputs whose error exceeds the error gate's limits at these sizes."""
    judged = [("", o, e, _limits(spec, o, sizes)) for o, e in proved.outputs.items()]
    judged += [(" on stretched inputs", o, e, _far_limits(spec, o)) for o, e in proved.beyond.items()]
    return [
        f"case {case}: output {output!r} has a {statistic} of {value}, over {limit:.4g}{where}"
        for where, output, errors, limits in judged
        for statistic, limit in limits.items()
        if (value := getattr(errors, statistic)) > limit + ROUNDED
    ]


def _far_limits(spec: Spec, output: str) -> dict[str, float]:
    """The loosest limits of the error gate for one output on stretched inputs. There, an error may come from
    a few elements, and a report does not say from how many."""
    from coda_agent.verifier.numerics.limits import FAR

    wider = (spec.tolerance.factor if spec.tolerance else 1.0) * 2.0**10 * (1 + 2 * FAR.deviations)
    names = ("rms_ratio", "tile_ratio", "element_ratio")
    return {n: base * wider for n, base in zip(names, FAR.ratios(spec.outputs[output].dtype), strict=True)}


def _limits(spec: Spec, output: str, sizes: dict[str, int]) -> dict[str, float]:
    """The error gate's limits for one output, by name of the ratio (see ``error_gate.compare``). An error
    over few elements scatters, so each limit has slack that depends on the number of elements. A report does
    not say which tile had the worst ratio. So the limit on ``tile_ratio`` has the slack of the output's
    smallest tile."""
    from coda_agent.verifier.numerics.error_gate import FEW
    from coda_agent.verifier.numerics.limits import ErrorLimits

    shape = [extent(sizes) for extent in spec.outputs[output].shape] or [1]
    rows, columns = shape[0], math.prod(shape[1:])
    limits, count = ErrorLimits(), rows * columns
    tile = (rows % TILE or TILE) * (columns % TILE or TILE)
    wider = (spec.tolerance.factor if spec.tolerance else 1.0) * (2.0 ** (10 / count) if count < FEW else 1.0)
    deviations = limits.deviations * (1 + 1 / rows)
    slack = {"rms_ratio": count, "tile_ratio": tile, "element_ratio": count}
    return {
        statistic: base * wider * (1 + deviations / math.sqrt(n))
        for (statistic, n), base in zip(slack.items(), limits.ratios(spec.outputs[output].dtype), strict=True)
    }


def figures_of(report: Accepted, gate: str) -> dict[str, Any]:
    return next((g.figures for g in report.gates if g.gate == gate), {})
