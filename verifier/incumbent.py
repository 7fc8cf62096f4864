"""The incumbent: the accepted kernel that a change has to beat, and its schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.schedule import Schedule, all_by_step, by_step
from coda_agent.verifier.gpu.checks import KernelCase
from coda_agent.verifier.report import Timing
from coda_agent.verifier.spec.model import Spec
from coda_agent.verifier.spec.parts import Case

Known = Mapping[int, Sequence[Schedule]]  # schedules worth timing, by step


@dataclass(frozen=True)
class Incumbent:
    """The accepted kernel that a change has to beat. ``schedules``: its tuned schedules, by case and step.
    ``finalists``: its schedules in the last tuning round, by case and step."""

    kernel: KernelSource
    schedules: Mapping[str, Mapping[int, Schedule]]
    finalists: Mapping[str, Known]

    @classmethod
    def of(cls, kernel: KernelSource, timings: Iterable[Timing]) -> Incumbent:
        """The incumbent with the schedules of a report's timings. Raises ProgramError."""
        timed = list(timings)
        tuned = {t.case: t.schedules for t in timed}
        return cls.parsed(kernel, tuned, {t.case: t.finalists for t in timed})

    @classmethod
    def parsed(
        cls,
        kernel: KernelSource,
        schedules: Mapping[str, Mapping[str, Any]],
        finalists: Mapping[str, Mapping[str, Sequence[Any]]],
    ) -> Incumbent:
        """The incumbent with schedules as JSON data. Raises ProgramError."""
        tuned = {case: by_step(steps) for case, steps in schedules.items()}
        return cls(kernel, tuned, parse_schedules(finalists))

    @property
    def proved(self) -> Known:
        """The tuned schedules of all cases, by step. The incumbent's results were checked with these
        schedules."""
        return all_by_step(self.schedules.values())

    def job(self, spec: Spec, case: Case) -> KernelCase:
        """A job that tunes the incumbent again, but tries only its known schedules. The job ignores a cached
        result of tuning, because that result may come from another GPU."""
        known = worth_racing(self.schedules.get(case.name, {}), self.finalists.get(case.name, {}))
        return KernelCase(spec, self.kernel, case.name, case.sizes, known=known, afresh=True)


def worth_racing(chosen: Mapping[int, Schedule], last: Known) -> Known:
    """The schedules to time for each step: those in the ``last`` tuning round, or else, if ``last`` has none
    for the step, the ``chosen`` schedule."""
    return {step: [schedule] for step, schedule in chosen.items()} | dict(last)


def parse_schedules(finalists: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, Known]:
    """Parse schedules by case and step from JSON data. Raises ProgramError."""
    return {
        case: {int(step): [Schedule.from_json(s) for s in every] for step, every in steps.items()}
        for case, steps in finalists.items()
    }
