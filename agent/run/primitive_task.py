"""The task of ``coda-agent primitive``: an author writes the CuTeDSL code of a proposed primitive."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coda_agent.agent.prompts import prompt
from coda_agent.agent.run import optimize, runs
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.raw.interpreter import known_words
from coda_agent.primitives.system.files import ROOT
from coda_agent.verifier import verify
from coda_agent.verifier.gates import Progress
from coda_agent.verifier.proposals import proposal as proposing
from coda_agent.verifier.proposals import proposal_gates
from coda_agent.verifier.proposals.proposal import Proposal
from coda_agent.verifier.report import Accepted, Measurement
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.agent.run.task import Measure
    from coda_agent.verifier.incumbent import Incumbent
    from coda_agent.verifier.stages import Checkpoint

PROPOSES = "proposes"  # the header field with the proposal's YAML as it was when the run started
FAMILY, VALUES = "primitives/lang/ops/elementwise.py", "primitives/device/values.py"
HOW = """\
Answer with the functions in one ```python block, in full each time; only the last such block counts.
"""
EXAMPLES = ("abs", "where", "tanh", "sin", "silu", "gelu")
PACK = optimize.PACK.with_name("primitive.md")


@dataclass(frozen=True)
class PrimitiveTask:
    """The task (``agent.run.task.Task``) of writing a proposed primitive. ``text``: the proposal's YAML."""

    spec: Spec
    text: str
    proposal: Proposal
    edits = True

    @classmethod
    def of(cls, run: runs.Run) -> PrimitiveTask:
        text = str(run.journal.header[PROPOSES])
        return cls(run.spec, text, proposing.parse(text))

    def opening(self) -> prompt.Prompt:
        return prompt.Prompt(pack(), self._task())

    def _task(self) -> str:
        given, name = self.proposal, self.proposal.name
        arguments = ", ".join(f"{a}: Any" for a in given.arguments)
        inside = "; ".join(
            f"{a} in [{low:g}, {high:g}]" for a in given.arguments for low, high in [given.interval(a)]
        )
        return (
            f"Write `{name}`. In its proposal `reference` is the mathematics, not the way to compute it:"
            f"\n\n```yaml\n{self.text.strip()}\n```\n\n"
            f"It has to hold for {inside} (no NaN), within {given.ulps:g} units in the last place. "
            f"The function: `def {name}({arguments}) -> Any`.\n\n{HOW}"
        )

    def rival(self) -> None:
        return None

    def check(self, source: str, schedules: Mapping[int, Schedule], progress: Progress) -> verify.Verdict:
        return proposal_gates.check(self.proposal, self.spec, source, progress)

    def measuring(self, usual: Measure, progress: Progress) -> Measure:
        """Return a function that checks a primitive on the GPU. The function does not time the primitive,
        because acceptance depends only on correctness."""

        def measure(
            spec: Spec, kernel: KernelSource, keep: Checkpoint, kept: Incumbent | None
        ) -> Measurement:
            assert kernel.edited is not None  # the primitive's functions, which are the author's answer
            return proposal_gates.measure(self.proposal, spec, kernel.edited, progress)

        return measure

    def accepted(self, report: Accepted, program: Program, rounds: int) -> str:
        return f"Accepted: it is right. {rounds} round(s) are left to make it cheaper.\n\n{HOW}"


def pack() -> str:
    """The part of the prompt that all proposals share: the rules, the language and existing primitives."""
    from coda_agent.primitives.compiler.lower import exports

    language = (
        optimize.PACK.read_text(encoding="utf-8")
        .partition("# 2. The language")[2]
        .partition("**Threads.**")[0]
    )
    role = PACK.read_text(encoding="utf-8").replace(
        "{exports}", ", ".join(f"`{name}`" for name in exports()["values"])
    )
    role = role.replace("{known}", known_words())
    parts = [role, "# The language" + language, *_examples()]
    return "\n\n".join(part.strip() for part in parts)


def _examples() -> Iterable[str]:
    """Show existing primitives: the definitions of ``EXAMPLES``, then all device functions."""
    entries, functions = (_sources((ROOT / path).read_text(encoding="utf-8")) for path in (FAMILY, VALUES))
    yield (
        f"# Existing primitives\n\nIn `{FAMILY}`, where `cute` is the text that calls the exact function, "
        "and `fast` the text that calls the fast one (both texts are made for you):"
    )
    yield "```python\n" + "\n\n\n".join(entries[name] for name in EXAMPLES) + "\n```"
    yield f"In `{VALUES}`:"
    yield "```python\n" + "\n\n\n".join(functions.values()) + "\n```"


def _sources(text: str) -> dict[str, str]:
    """Map the name of each function in a module's text to the function's source, including decorators."""
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found
