"""The task of a run's author, and its check without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from coda_agent.agent.prompts import prompt
from coda_agent.agent.run import improve
from coda_agent.agent.show.explain import steps
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier import verify
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.report import Accepted, Measurement
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.agent.tips import Tip
    from coda_agent.verifier.incumbent import Incumbent
    from coda_agent.verifier.measure import Checkpoint


class Measure(Protocol):
    """Run the GPU gates. ``kept`` is the incumbent."""

    def __call__(
        self, spec: Spec, kernel: KernelSource, keep: Checkpoint, kept: Incumbent | None
    ) -> Measurement: ...


class Check(Protocol):
    """Run the gates that need no GPU, as ``verifier.verify.check`` does."""

    def __call__(
        self,
        spec: Spec,
        source: str,
        *,
        schedules: Mapping[int, Schedule] | None = None,
        weak_jail: bool = False,
        progress: Progress = ...,
    ) -> verify.Verdict: ...


class Task(Protocol):
    """A task. ``edits``: its answer is CuTeDSL instead of a kernel file."""

    edits: bool

    def opening(self) -> prompt.Prompt:
        """The author's first message."""

    def rival(self) -> Incumbent | None:
        """The incumbent that the first answer must beat, besides the baseline."""

    def check(self, source: str, schedules: Mapping[int, Schedule], progress: Progress) -> verify.Verdict:
        """Run the gates that need no GPU. ``schedules`` are the author's, by step."""

    def measuring(self, usual: Measure, progress: Progress) -> Measure:
        """The function that measures an answer on a GPU. ``usual`` measures kernels."""

    def accepted(self, report: Accepted, program: Program, rounds: int) -> str:
        """The message after an acceptance. ``rounds`` remain to make the kernel faster."""


@dataclass(frozen=True)
class AuthoringTask:
    """Author a kernel for a spec. ``text`` is the spec's YAML as the author sees it; ``tips`` come from the
    log; ``derived`` is the program to beat, of a backward that was derived; ``elsewhere`` checks a source, if
    that is not done in this process."""

    spec: Spec
    text: str
    tips: Sequence[Tip] | None = None
    weak_jail: bool = False
    derived: Program | None = None
    elsewhere: Check | None = None
    edits = False

    def opening(self) -> prompt.Prompt:
        made = prompt.assemble(self.spec, self.text, self.tips)
        return replace(made, task=f"{made.task}\n\n{_to_beat(self.derived)}") if self.derived else made

    def rival(self) -> Incumbent | None:
        from coda_agent.verifier.incumbent import Incumbent

        return Incumbent(KernelSource(self.derived), {}, {}) if self.derived else None

    def check(self, source: str, schedules: Mapping[int, Schedule], progress: Progress) -> verify.Verdict:
        check = self.elsewhere or verify.check
        return check(self.spec, source, schedules=schedules, weak_jail=self.weak_jail, progress=progress)

    def measuring(self, usual: Measure, progress: Progress) -> Measure:
        return usual

    def accepted(self, report: Accepted, program: Program, rounds: int) -> str:
        return improve.words(self.spec, report, program, rounds)


def _to_beat(program: Program) -> str:
    """The derived program in words: an author starts from it."""
    lines = []
    for step in steps(program):
        lines += [f"{step.title}", *(f"  {line.verb} {line.text}" for line in step.lines)]
    words = "A derived program computes this already, in these kernels. Yours has to be faster in one case at"
    return f"{words} least, and slower in none:\n\n```text\n" + "\n".join(lines) + "\n```"
