"""Generate a plan's calls as straight-line Python functions, as Inductor does for a graph.

A generated function contains allocations, views and launches, one after another. A call takes half as much
host time as it would with loops and lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class CallWriter:
    """Generates Python functions that take ``number`` tensors. In the generated code, ``x0``, ``x1``, ... are
    the tensors passed to a call, and ``c0``, ``c1``, ... are constants. The code contains no names from a
    program. ``known``: further names that the code may use, with their values."""

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
        """The code of a view of a value. ``change``: a code template such as ``{}.mT``. This method computes
        a view of a constant, once. Each call computes the views of all other values."""
        text = change.format(value)
        if value not in self._constants:
            return text
        if text not in self._views:
            self._views[text] = self.constant(eval(text, self._constants))
        return self._views[text]

    def function(self, parameters: Sequence[str], lines: Iterable[str]) -> Callable[..., Any]:
        """Return a function that has these parameters, and these lines of code as its body."""
        text = "\n    ".join([f"def call({', '.join(parameters)}):", *lines])
        names = dict(self._constants)
        exec(compile(text, "<calls of a plan>", "exec"), names)
        return names.pop("call")  # or its globals would keep the function, and so the workspace, alive
