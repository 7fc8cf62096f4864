"""Functions that tamper with a program's JSON. A child that has been taken over sends this JSON instead of
the tracer's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cheats.corpus import Cheat, Rejection, Twin, rejected, sends
from cheats.twins import RMSNORM

Json = dict[str, Any]
Change = Callable[[Json], object]


class Recorder:
    """A collection of cheats. ``@cheat(ends, twin)`` decorates a function that changes the twin's program.
    The function's name and docstring become the cheat's. If the function returns a value, the child sends
    this value instead of the changed program; a string is sent as it is."""

    def __init__(self) -> None:
        self.cheats: list[Cheat] = []

    def __call__(self, ends: Rejection, twin: Twin = RMSNORM) -> Callable[[Change], Change]:
        def record(change: Change) -> Change:
            program = json.loads(twin.program.to_json())
            made = change(program)
            text = made if isinstance(made, str) else json.dumps(program if made is None else made)
            name, tries = change.__name__.replace("_", " "), change.__doc__ or ""
            # One line per node, so that the verifier refuses the program and not the lines.
            source = sends(text, [1] * len(program["nodes"]))
            self.cheats.append(Cheat(name, tries, twin, source, ends, taken_over=True))
            return change

        return record


def refused(code: str, says: str) -> Rejection:
    return rejected("trace", code, says)


def node(program: Json, op: str) -> list[Any]:
    """Return the first node of an operation: [op, args, attribute]."""
    return next(n for n in program["nodes"] if n[0] == op)


def add(program: Json, op: str, args: list[Any], attribute: object = None) -> int:
    """Add a node at the end; return its number."""
    program["nodes"].append([op, args, attribute])
    return len(program["nodes"]) - 1
