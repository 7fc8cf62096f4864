"""Generate a plan's calls as straight-line Python functions, as Inductor does for a graph.

A generated function contains allocations, views and launches, one after another. Because it has no loops or
lookups, a call takes half the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class CallWriter:
    """Generates Python functions that take ``number`` tensors. In their code, ``x0``, ``x1``, ... are the
    tensors passed to a call, and ``c0``, ``c1``, ... are constants. No name of a program occurs in the code.
    ``known``: further names that the code may use, with their values."""

    def __init__(self, number: int, known: Mapping[str, Any]):
        self.given = [f"x{i}" for i in range(number)]
        self._constants: dict[str, Any] = dict(known)
        self._views: dict[str, str] = {}  # maps the code of a view of a constant to the view's name

    def constant(self, value: Any) -> str:
        """Add a constant, a value that no call changes; return its name."""
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def view(self, value: str, change: str) -> str:
        """The code of a view of a value. ``change``: a code template such as ``{}.mT``. A view of a constant
        is computed once, by this method. A view of any other value is computed in each call."""
        text = change.format(value)
        if value not in self._constants:
            return text
        if text not in self._views:
            self._views[text] = self.constant(eval(text, self._constants))
        return self._views[text]

    def function(self, parameters: Sequence[str], lines: Iterable[str]) -> Callable[..., Any]:
        """A function with these parameters that runs these lines of code."""
        text = "\n    ".join([f"def call({', '.join(parameters)}):", *lines])
        names = dict(self._constants)
        exec(compile(text, "<calls of a plan>", "exec"), names)
        return names.pop("call")  # otherwise the function would keep itself, and the workspace, alive
