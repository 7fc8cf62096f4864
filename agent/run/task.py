"""The task that a run gives its author. The task also checks the author's answers with the gates that need no
GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    from coda_agent.verifier.stages import Checkpoint


class Measure(Protocol):
    """A function that runs the gates that need a GPU. ``kept``: the incumbent (the kernel to beat), if
    any."""

    def __call__(
        self, spec: Spec, kernel: KernelSource, keep: Checkpoint, kept: Incumbent | None
    ) -> Measurement: ...


class Task(Protocol):
    """An author's task. ``edits``: the author answers with CuTeDSL instead of a kernel file."""

    edits: bool

    def opening(self) -> prompt.Prompt:
        """The author's first prompt."""

    def rival(self) -> Incumbent | None:
        """The incumbent. The first answer must be faster than the incumbent and faster than the baseline.
        None if the task has no incumbent."""

    def check(self, source: str, schedules: Mapping[int, Schedule], progress: Progress) -> verify.Verdict:
        """Run the gates that need no GPU. ``schedules``: the schedules that the author set, by step."""

    def measuring(self, usual: Measure, progress: Progress) -> Measure:
        """The function that measures an answer to this task on a GPU. ``usual``: the function that measures
        ordinary kernels."""

    def accepted(self, report: Accepted, program: Program, rounds: int) -> str:
        """The message to the author after a kernel is accepted. ``rounds``: how many rounds remain in which
        to make the kernel faster."""


@dataclass(frozen=True)
class AuthoringTask:
    """The task of authoring a kernel for a spec. ``text``: the spec's YAML as the author sees it. ``tips``:
    the tips in the prompt; None means the accepted tips in tips_log.md. ``derived``: for a derived backward,
    the program that the kernel has to beat. ``elsewhere``: a function to call instead of ``verify.check``."""

    spec: Spec
    text: str
    tips: Sequence[Tip] | None = None
    weak_jail: bool = False
    derived: Program | None = None
    elsewhere: Callable[..., verify.Verdict] | None = None
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
    """Describe, for the prompt, the derived program that the author has to beat."""
    lines = []
    for step in steps(program):
        lines += [f"{step.title}", *(f"  {line.verb} {line.text}" for line in step.lines)]
    words = "A derived program computes this already. Yours has to be faster in at least one case, and slower"
    return f"{words} in none. Its kernels:\n\n```text\n" + "\n".join(lines) + "\n```"
