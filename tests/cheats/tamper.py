"""How to tamper with a program's JSON, which a child taken over sends instead of what the tracer would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cheats.corpus import Cheat, Rejection, Twin, rejected, sends
from cheats.twins import RMSNORM

Json = dict[str, Any]
Change = Callable[[Json], object]


class Recorder:
    """``@cheat(ends, twin)`` stands above a change of the twin's program, whose name and docstring are the
    cheat's. What it returns, if anything, is sent instead of the program it was given; a text, as it is."""

    def __init__(self) -> None:
        self.cheats: list[Cheat] = []

    def __call__(self, ends: Rejection, twin: Twin = RMSNORM) -> Callable[[Change], Change]:
        def record(change: Change) -> Change:
            program = json.loads(twin.program.to_json())
            made = change(program)
            text = made if isinstance(made, str) else json.dumps(program if made is None else made)
            name, tries = change.__name__.replace("_", " "), change.__doc__ or ""
            # As many lines as nodes, so that it is the program that is refused.
            source = sends(text, [1] * len(program["nodes"]))
            self.cheats.append(Cheat(name, tries, twin, source, ends, taken_over=True))
            return change

        return record


def refused(code: str, says: str) -> Rejection:
    return rejected("trace", code, says)


def node(program: Json, op: str) -> list[Any]:
    """The first node of an operation: [op, args, attribute]."""
    return next(n for n in program["nodes"] if n[0] == op)


def add(program: Json, op: str, args: list[Any], attribute: object = None) -> int:
    """A new last node; its number."""
    program["nodes"].append([op, args, attribute])
    return len(program["nodes"]) - 1
