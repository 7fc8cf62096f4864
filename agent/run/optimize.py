"""Optimizing: the author gets an accepted kernel's CuTeDSL with what was measured of it, and edits it.

The program stays the contract: what the text computes is judged against it, and it has to beat the kernel
that it was made from. The stable prefix of the prompt is ``cutedsl.md``; the task is this kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent import providers
from coda_agent.agent.artifacts import accept
from coda_agent.agent.prompts import prompt
from coda_agent.agent.run import improve
from coda_agent.agent.show import counters
from coda_agent.agent.tips import CUTEDSL, in_prompts, kept, read_tips
from coda_agent.primitives.compiler.lower import editable
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
It is kept only if every output is right, and if it is measured to be faster than the kernel above in one case
at least (the lower end of its interval above 1, in the same run) and slower in none.
"""


@dataclass(frozen=True)
class Base:
    """The accepted kernel that an edit starts from. ``raw``: its text, where it is an edited one itself;
    ``counted``: its hardware counters in words, where an export of them is kept."""

    program: Program
    report: Accepted
    raw: str = ""
    counted: str = ""

    @property
    def text(self) -> str:
        return self.raw or editable(self.program)

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program.to_json(),
            "report": self.report.model_dump(mode="json"),
            "raw": self.raw,
            "counted": self.counted,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any], spec: Spec) -> Base:
        program = Program.from_json(found["program"], spec.signature())
        return cls(program, Accepted.model_validate(found["report"]), found["raw"], found["counted"])


def base(spec: Spec, directory: Path | None = None, *, afresh: bool = False) -> Base:
    """The accepted kernel of a spec, by default of generated_kernels/: its edited text where there is one,
    unless the program was measured again since, or it is to be edited ``afresh``. Raises Absent,
    and KernelError for files that are damaged."""
    directory = directory or accept.KERNELS
    found = accept.read(spec, directory)
    edit = None if afresh else accept.read(spec, directory, raw=True)
    if edit and found and not accept.superseded(edit.report, found.report):
        found = edit
    if found is None:
        raise Absent(
            f"{directory}: no accepted kernel of {spec.name}; author one first: coda-agent generate "
            f"specs/{spec.name}.yaml"
        )
    counted = _counted(spec, found.program, directory, found.raw)
    return Base(found.program, _bare(found.report), found.raw, counted)


def _counted(spec: Spec, program: Program, directory: Path, raw: str) -> str:
    """In words; nothing of a schedule that is known to be another than the one that was measured."""
    name = f"{spec.name}{'.raw' if raw else ''}"
    path = directory / f"{name}.counters.csv"
    if not path.exists():
        return ""
    kernel = directory / f"{name}.program.json"
    export, found = counters.counted(program, spec, kernel, path, raw=raw)
    if any(c.other_schedule for c in found):
        return ""
    return f"At {export.case or spec.cases[0].name}:\n\n{counters.words(found)}"


def _bare(report: Accepted) -> Accepted:
    """Without the samples: they are not for a prompt."""
    return report.model_copy(
        update={"timings": tuple(t.model_copy(update={"samples": {}}) for t in report.timings)}
    )


@dataclass(frozen=True)
class Editing:
    """An edited text of an accepted kernel's (``agent.run.task.Work``). ``text``: the spec's YAML."""

    spec: Spec
    text: str
    base: Base
    raw = True

    @classmethod
    def of(cls, run: Run) -> Editing:
        """A run's, from the kernel as it was when the run began."""
        # A run that is played back begins as the recorded one did.
        afresh = providers.named(run.journal.header["provider"]).replays
        found = run.journal.once("base", "base", lambda: base(run.spec, afresh=afresh).to_json())
        return cls(run.spec, run.text, Base.from_json(found, run.spec))

    def opening(self) -> prompt.Prompt:
        parts = [PACK.read_text(encoding="utf-8").strip()]
        known = [tip for tip in in_prompts(read_tips(), CUTEDSL) if self.spec.name not in tip.specs]
        if useful := kept(known, TIPS_CHARACTERS):
            parts.append(prompt.lessons(useful))
        return prompt.Prompt("\n\n".join(parts), self._task())

    def _task(self) -> str:
        parts = [
            "Make this kernel faster. Its spec, whose `reference` is the mathematics:\n\n"
            f"```yaml\n{self.text.strip()}\n```",
            f"The CuTeDSL module that computes it now:\n\n```python\n{self.base.text.strip()}\n```",
            "What was measured of it, from a cold L2:",
            *improve.account(self.spec, self.base.report, self.base.program),
            self.base.counted and f"Hardware counters:\n\n{self.base.counted}",
            HOW,
        ]
        return "\n\n".join(part.strip() for part in parts if part)

    def rival(self) -> Incumbent:
        from coda_agent.verifier.incumbent import Incumbent

        return Incumbent.of(self.base.program, self.base.report.timings, self.base.raw)

    def check(self, source: str, schedules: Mapping[int, Schedule], progress: Progress) -> verify.Verdict:
        return verify.check_raw(
            self.spec,
            self.base.program._replace(schedule={}),
            source,
            schedules=schedules,
            tuned=self._tuned,
            progress=progress,
        )

    @property
    def _tuned(self) -> tuple[Schedule, ...]:
        """The schedules that the kernel was tuned to, each once."""
        every = [s._replace(swizzle=8) for steps in self.rival().schedules.values() for s in steps.values()]
        return tuple(dict.fromkeys(every))

    def measuring(self, usual: Measure, progress: Progress) -> Measure:
        return usual

    def accepted(self, report: Accepted, program: Program, rounds: int) -> str:
        words = f"Accepted: it is right, and faster than before. {rounds} round(s) are left to go on."
        parts = [words, *improve.account(self.spec, report, program), HOW]
        return "\n\n".join(part.strip() for part in parts)
