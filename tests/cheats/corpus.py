"""A cheat: an honest kernel, the one change that makes it hostile, and how the cheat must end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.kernel_file import trace_lines
from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.model import Spec

HERE = Path(__file__).parent
SPECS = HERE.parents[1] / "specs"


@dataclass(frozen=True)
class Rejection:
    """A gate rejects the cheat with one of ``codes``. ``says`` is part of the message, so that a rejection
    for another fault, such as a misspelt name, does not count."""

    gate: str
    codes: tuple[str, ...]
    says: str


@dataclass(frozen=True)
class Contained:
    """The cheat leaves no trace: it writes nothing to this process's descriptors, and leaves no process or
    file. The program is the twin's."""


def rejected(gate: str, code: str, says: str) -> Rejection:
    return Rejection(gate, (code,), says)


BY_SIZE = Rejection("trace", ("size_choice",), "sizes and literals alone")


def wrong(output: str) -> Rejection:
    """Return the rejection of wrong numbers in the interpreter: by the error gate, or because integers
    differ."""
    return Rejection("interpret", ("numerics", "inexact"), f"output {output!r}")


@dataclass(frozen=True)
class Twin:
    """An honest kernel of a spec. Its verdict is "checked", even if a child that has been taken over sends
    its program."""

    name: str
    source: str

    @cached_property
    def spec(self) -> Spec:
        return _spec(self.name)

    @cached_property
    def traced(self) -> tuple[Program, list[int | None]]:
        return trace_lines(self.source, self.spec.signature())

    @property
    def program(self) -> Program:
        return self.traced[0]

    @property
    def sent(self) -> str:
        """The code with which a child that has been taken over sends the honest program."""
        return sends(self.program.to_json(), self.traced[1])

    def cheat(self, name: str, tries: str, changes: Mapping[str, str], ends: Rejection | Contained) -> Cheat:
        """Return the kernel with ``changes`` as a cheat. A key of ``changes`` is an old text, which occurs
        once; the value is the new text."""
        source = self.source
        for old, new in changes.items():
            assert source.count(old) == 1, f"{self.name}: {old!r} occurs {source.count(old)} times"
            source = source.replace(old, new)
        return Cheat(name, tries, self, source, ends)


@dataclass(frozen=True)
class Cheat:
    """A kernel that one change makes hostile. ``source`` is a kernel file. If ``taken_over``, a jailed child
    executes ``source`` with every builtin and no language check, then sends its ``answer`` to the
    verifier."""

    name: str
    tries: str
    twin: Twin
    source: str
    ends: Rejection | Contained
    taken_over: bool = False


def sends(text: str, lines: list[int | None]) -> str:
    """Return Python code that sends a program's JSON as the tracer would."""
    return f"answer = {{'program': {text!r}, 'lines': {lines}}}\n"


@cache
def _spec(name: str) -> Spec:
    own = HERE / f"{name}.yaml"
    return load(own if own.exists() else SPECS / f"{name}.yaml", check=False)
