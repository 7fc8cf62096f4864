"""A kernel as it runs: a program, its schedules, and optionally edited code that replaces the code lowered
from the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coda_agent.primitives.compiler.lower import Lowered, editable, lower, lower_edited
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import Signature


@dataclass(frozen=True)
class KernelSource:
    """The source of a kernel: its program and, if an author edited the lowered code, the edited code.

    ``schedules``: the chosen schedules by step; tuning chooses the schedules of all other steps. ``edited``:
    CuTeDSL that replaces the code lowered from the program; a confined child process compiles it. If
    ``edited`` is None, the lowered code runs.
    """

    program: Program
    schedules: Mapping[int, Schedule] = field(default_factory=dict)
    edited: str | None = None

    @property
    def lowered(self) -> Lowered:
        """The CuTeDSL that runs, and its kernels' arguments. Raises ProgramError as ``lower`` does."""
        if self.edited is None:
            return lower(self.program)
        return lower_edited(self.program, self.edited)

    @property
    def text(self) -> str:
        """The CuTeDSL from which an author's next edit starts."""
        return editable(self.program) if self.edited is None else self.edited

    @property
    def fixed(self) -> dict[int, Schedule]:
        """The schedules of the steps that need no tuning. If the program itself gives a step's schedule, this
        schedule overrides the chosen one."""
        return {**self.schedules, **self.program.schedule}

    def on(self, schedules: Mapping[int, Schedule]) -> KernelSource:
        """Return the same kernel with these schedules."""
        return replace(self, schedules=schedules)

    def to_json(self) -> dict[str, str]:
        """Return the program and the edited code. Schedules are stored separately, per case."""
        return {"program": self.program.to_json(), "raw": self.edited or ""}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], signature: Signature | None = None) -> KernelSource:
        """Read ``to_json``'s fields. Raises ProgramError for an invalid program."""
        return cls(Program.from_json(data["program"], signature), edited=data["raw"] or None)
