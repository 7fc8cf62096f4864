"""Write what a plan's calls do as Python functions without branches, as Inductor does for a graph.

The text of a function has allocations, views and launches one after another, so a call looks nothing up and
loops over nothing, which takes half the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class CallWriter:
    """Writes functions of ``number`` tensors. A value is a Python expression: ``x0``, ``x1`` and so on for
    the tensors that a call is given, ``c0``, ``c1`` and so on for constants, and views of both. No name of a
    program enters the text. ``known``: further names that the text uses."""

    def __init__(self, number: int, known: Mapping[str, Any]):
        self.given = [f"x{i}" for i in range(number)]
        self._constants: dict[str, Any] = dict(known)
        self._views: dict[str, str] = {}  # of constants, each taken once

    def constant(self, value: Any) -> str:
        """The name of a value that no call changes."""
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def view(self, value: str, change: str) -> str:
        """A view, such as ``{}.mT``, of a value. Each call takes it again, but a view of a constant is taken
        only here."""
        text = change.format(value)
        if value not in self._constants:
            return text
        if text not in self._views:
            self._views[text] = self.constant(eval(text, self._constants))
        return self._views[text]

    def function(self, taken: Sequence[str], lines: Iterable[str]) -> Callable[..., Any]:
        """A function of the ``taken`` tensors that runs these lines."""
        text = "\n    ".join([f"def call({', '.join(taken)}):", *lines])
        names = dict(self._constants)
        exec(compile(text, "<calls of a plan>", "exec"), names)
        return names.pop("call")  # else the function would keep itself, and a workspace, alive
