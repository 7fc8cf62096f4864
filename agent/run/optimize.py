"""The task of ``coda-agent optimize``: a model edits the CuTeDSL of an accepted kernel, and sees the kernel's
measurements.

Edited code must compute the same outputs as the kernel's program, and must be faster than the original
kernel. The prompt begins with the text of ``cutedsl.md``, which is the same for every run. The kernel to edit
follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent import providers
from coda_agent.agent.prompts import prompt
from coda_agent.agent.run import improve
from coda_agent.agent.show import counters
from coda_agent.agent.storage import kernel_files
from coda_agent.agent.tips import CUTEDSL, fitting, in_prompts, read_tips
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import Absent
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier import verify
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.report import Accepted
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.agent.run.runs import Run
    from coda_agent.agent.run.task import Measure
    from coda_agent.verifier.incumbent import Incumbent

PACK = Path(__file__).parents[1] / "prompts" / "pack" / "cutedsl.md"
TIPS_CHARACTERS = 10_000

HOW = """\
Answer with the whole edited module in one ```python block; its docstring says the idea in one sentence. Keep
the classes' names and their arguments. Schedules are tuned again for your text unless you set them, in one
```json block that maps steps to fields, such as {"0": {"tile_m": 128, "tile_n": 256, "pingpong": false}}.
Your edit is kept only if every output is right, and if it is faster than the kernel above in at least one
case and slower in none. Both are measured in the same run; faster means that the lower end of the speedup's
interval is above 1.
"""


@dataclass(frozen=True)
class Original:
    """The kernel that an edit starts from. This is an accepted kernel, edited or not, or the kernel of a
    derived program. ``report``: None for a derived program. ``counted``: text about the kernel's hardware
    counters; "" if the kernel has no usable counters."""

    kernel: KernelSource
    report: Accepted | None
    counted: str = ""

    def to_json(self) -> dict[str, Any]:
        report = self.report and self.report.model_dump(mode="json")
        return self.kernel.to_json() | {"report": report, "counted": self.counted}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], spec: Spec) -> Original:
        kernel = KernelSource.from_json(found, spec.signature())
        report = found["report"] and Accepted.model_validate(found["report"])
        return cls(kernel, report, found["counted"])


def base(spec: Spec, directory: Path | None = None, *, afresh: bool = False) -> Original:
    """The accepted kernel of a spec, by default from generated_kernels/. If the kernel has an accepted edit,
    return the edit or the unedited kernel, whichever was measured later. ``afresh``: always return the
    unedited kernel. Raises Absent if there is no accepted kernel, and KernelError for damaged files."""
    directory = directory or kernel_files.KERNELS
    found = kernel_files.read(spec, directory)
    edit = None if afresh else kernel_files.read(spec, directory, edited=True)
    if edit and found and not kernel_files.superseded(edit.report, found.report):
        found = edit
    if found is None:
        raise Absent(
            f"{directory}: no accepted kernel for {spec.name}; author one first: coda-agent generate "
            f"specs/{spec.name}.yaml"
        )
    return Original(found.kernel, _bare(found.report), _counted(spec, found.kernel, directory))


def _counted(spec: Spec, kernel: KernelSource, directory: Path) -> str:
    """Text about the kernel's hardware counters. "" if no file of counters exists, or if the counters were
    measured with another schedule than the report's."""
    name = f"{spec.name}{'.raw' if kernel.edited else ''}"
    path = directory / f"{name}.counters.csv"
    if not path.exists():
        return ""
    export, found = counters.counted(kernel, spec, directory / f"{name}.program.json", path)
    if any(c.other_schedule for c in found):
        return ""
    return f"At {export.case or spec.cases[0].name}:\n\n{counters.words(found)}"


def _bare(report: Accepted) -> Accepted:
    """The report without its samples, because a prompt does not need samples."""
    return report.model_copy(
        update={"timings": tuple(t.model_copy(update={"samples": {}}) for t in report.timings)}
    )


@dataclass(frozen=True)
class EditingTask:
    """The task of editing a kernel; implements ``agent.run.task.Task``. ``text``: the spec's YAML."""

    spec: Spec
    text: str
    base: Original
    edits = True

    @classmethod
    def of(cls, run: Run) -> EditingTask:
        """The task of a run, with the kernel as it was when the run started."""
        # A replay starts from the unedited kernel, as the recorded run did.
        afresh = providers.provider_spec(run.journal.header["provider"]).replays
        derived = run.derived

        def begin() -> dict[str, Any]:
            own = Original(KernelSource(derived), None) if derived else base(run.spec, afresh=afresh)
            return own.to_json()

        found = run.journal.once("base", "base", begin)
        return cls(run.spec, run.text, Original.from_json(found, run.spec))

    def opening(self) -> prompt.Prompt:
        parts = [PACK.read_text(encoding="utf-8").strip()]
        known = [tip for tip in in_prompts(read_tips(), CUTEDSL) if self.spec.name not in tip.specs]
        if useful := fitting(known, TIPS_CHARACTERS):
            parts.append(prompt.lessons(useful))
        return prompt.Prompt("\n\n".join(parts), self._task())

    def _task(self) -> str:
        report, program = self.base.report, self.base.kernel.program
        measured = improve.account(self.spec, report, program) if report else []
        parts = [
            "Make this kernel faster. Its spec, whose `reference` is the mathematics:\n\n"
            f"```yaml\n{self.text.strip()}\n```",
            f"The CuTeDSL module that computes it now:\n\n```python\n{self.base.kernel.text.strip()}\n```",
            report and "Its measured times, from a cold L2:",
            *measured,
            self.base.counted and f"Hardware counters:\n\n{self.base.counted}",
            HOW,
        ]
        return "\n\n".join(part.strip() for part in parts if part)

    def rival(self) -> Incumbent:
        from coda_agent.verifier.incumbent import Incumbent

        return Incumbent.of(self.base.kernel, self.base.report.timings if self.base.report else ())

    def check(self, source: str, schedules: Mapping[int, Schedule], progress: Progress) -> verify.Verdict:
        return verify.check_edited(
            self.spec,
            self.base.kernel.program._replace(schedule={}),
            source,
            schedules=schedules,
            tuned=self._tuned,
            progress=progress,
        )

    @property
    def _tuned(self) -> tuple[Schedule, ...]:
        """The kernel's tuned schedules with ``swizzle`` set to 8, without duplicates."""
        every = [s._replace(swizzle=8) for steps in self.rival().schedules.values() for s in steps.values()]
        return tuple(dict.fromkeys(every))

    def measuring(self, usual: Measure, progress: Progress) -> Measure:
        return usual

    def accepted(self, report: Accepted, program: Program, rounds: int) -> str:
        words = f"Accepted: it is right, and faster than before. {rounds} round(s) are left."
        parts = [words, *improve.account(self.spec, report, program), HOW]
        return "\n\n".join(part.strip() for part in parts)
