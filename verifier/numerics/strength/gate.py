"""The interpret gate, as a task for ``verifier.apart``: every run of a program on a CPU, then the checks of
its choices and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.system import deadline
from coda_agent.verifier.gates import judge
from coda_agent.verifier.numerics import cpu_numerics, failed_draws
from coda_agent.verifier.numerics.strength import exercise
from coda_agent.verifier.numerics.strength.choices import Counting, Coverage
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.worker import report


def interpret_gate(job: tuple[Spec, Program, int, Sequence[int | None]]) -> dict[str, Any]:
    """Judge a program; return the gate's figures. ``job``: the spec, the program, the seed of all draws, and
    the source line of each node. Raises Failed, and SpecError for a fault of the spec."""
    spec, program, seed, lines = job
    coverage = Coverage(program)
    worst: dict[str, float] = {}
    undefined: Counter[str] = Counter()
    with failed_draws.remembered(spec, program):
        for run in chain(failed_draws.of(spec, program), cpu_numerics.runs(spec, program, seed)):
            deadline.check()
            report("interpret", str(run))
            compared, counts = cpu_numerics.Comparison.of(spec, run), Counting(program, coverage.open)
            for how, errors in compared.errors(program, counts):
                judge(errors, f"in the interpreter, {run}, outputs {how}", run._asdict())
                for error in errors if how == cpu_numerics.STORED else ():
                    worst[error.name] = max(worst.get(error.name, 0.0), round(error.rms_ratio, 3))
            exercise.cover(compared, program, coverage, counts)
            undefined.update(compared.undefined)
        exercise.smooth(spec, program, seed)
        exercise.reach(spec, program, coverage, seed, lines)
    findings = [
        f"output {name} was not judged in {count} run(s): the reference overflows in fp32 there, loses more "
        "than its last rounding, or is zero by cancellation alone"
        for name, count in undefined.items()
    ]
    return {"worst_rms_ratio": worst, "choices": coverage.table(), "findings": findings}
