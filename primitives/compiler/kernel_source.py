"""A kernel as it runs: a program, the text that a model edited in place of its lowering, and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coda_agent.primitives.compiler.lower import Lowered, editable, lower, lower_edited
from coda_agent.primitives.lang.ir import Program, Signature
from coda_agent.primitives.lang.schedule import Schedule


@dataclass(frozen=True)
class KernelSource:
    """The source of a kernel: its program, or an edited text.

    ``schedules``: chosen ones by step; tuning chooses the others. ``edited``: CuTeDSL that runs
    in place of the program's own lowering, compiled in a confined child; None runs the lowering.
    """

    program: Program
    schedules: Mapping[int, Schedule] = field(default_factory=dict)
    edited: str | None = None

    @property
    def lowered(self) -> Lowered:
        """Its CuTeDSL and the arguments of its kernels. Raises ProgramError as ``lower`` does."""
        if self.edited is None:
            return lower(self.program)
        return lower_edited(self.program, self.edited)

    @property
    def text(self) -> str:
        """The CuTeDSL that an author of an edit starts from."""
        return editable(self.program) if self.edited is None else self.edited

    @property
    def fixed(self) -> dict[int, Schedule]:
        """The schedules that are not tuned: the chosen ones, and the program's own, which come first."""
        return {**self.schedules, **self.program.schedule}

    def on(self, schedules: Mapping[int, Schedule]) -> KernelSource:
        """The same kernel on these schedules."""
        return replace(self, schedules=schedules)

    def to_json(self) -> dict[str, str]:
        """Program and edited text; schedules are stored separately, by case."""
        return {"program": self.program.to_json(), "raw": self.edited or ""}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], signature: Signature | None = None) -> KernelSource:
        """Read ``to_json``'s fields. Raises ProgramError for an invalid program."""
        return cls(Program.from_json(data["program"], signature), edited=data["raw"] or None)
