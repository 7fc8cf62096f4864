"""The text that the cheats edit, and functions that insert lines into this text."""

from __future__ import annotations

from dataclasses import dataclass

from cheats.corpus import Cheat, Rejection, Twin
from cheats.twins import RMSNORM
from coda_agent.primitives.compiler.lower import editable
from coda_agent.primitives.lang.ir import Program

VISITOR = '        place = resources["place"]\n'
METHOD = "    @cute.jit\n    def epi_visit"
STEP = "class Step0(FusedGemm):\n"
BASES = f"\n\n{STEP}"
LAUNCH = "        launched = self.kernel("
FINISH = "        n11 = s11\n"


@dataclass(frozen=True)
class Edited(Twin):
    """A lowered text as an author gets it, or an honest edit of this text. Unchanged, it gets the verdict
    "checked"."""

    kernel: Twin

    @property
    def program(self) -> Program:
        return self.kernel.program


TWIN = Edited(RMSNORM.name, editable(RMSNORM.program), RMSNORM)


def indented(lines: str, spaces: int) -> str:
    return "".join(" " * spaces + line + "\n" for line in lines.splitlines())


def above(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Return an edit with ``lines`` at module level."""
    return TWIN.cheat(name, tries, {BASES: f"\n{lines}{BASES}"}, ends)


def inside(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Return an edit with ``lines`` in the visitor, which is traced for the device."""
    return TWIN.cheat(name, tries, {VISITOR: VISITOR + indented(lines, 8)}, ends)


def method(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Return an edit with ``lines`` in the class of a step."""
    return TWIN.cheat(name, tries, {METHOD: f"{indented(lines, 4)}\n{METHOD}"}, ends)


def launch(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Return an edit with ``lines`` before the launch. These lines run on the host."""
    return TWIN.cheat(name, tries, {LAUNCH: indented(lines, 8) + LAUNCH}, ends)


def finish(name: str, tries: str, lines: str, ends: Rejection) -> Cheat:
    """Return an edit with ``lines`` in the finishing kernel."""
    return TWIN.cheat(name, tries, {FINISH: indented(lines, 8) + FINISH}, ends)
