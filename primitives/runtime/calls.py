"""Generate a plan's calls as straight-line Python functions, as Inductor does for a graph.

A generated function contains allocations, views and launches, one after another. A call takes half as much
host time as it would with loops and lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CallWriter:
    """Generates Python functions that take tensors ``like`` these. In the generated code, ``x0``, ``x1``, ...
    are the tensors passed to a call, and ``c0``, ``c1``, ... are constants. The code contains no names from a
    program. ``known``: further names that the code may use, with their values."""

    def __init__(self, like: Sequence[Any], known: Mapping[str, Any]):
        self.given = [f"x{i}" for i in range(len(like))]
        self._constants: dict[str, Any] = dict(known)
        # by the code of a tensor that a call computes: the code of its base, and a tensor like it
        self._like = {name: (name, tensor) for name, tensor in zip(self.given, like, strict=True)}

    def constant(self, value: Any) -> str:
        """Add a constant, a value that no call changes; return its name."""
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def view(self, value: str, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
        """The code of the view ``change(value)``. A view of a constant is computed here, once. Each call
        computes the views of all other values. Inductor's function for views (``_reinterpret_tensor``) takes
        a third of the host time of a slice."""
        if value in self._constants:
            return self.constant(change(self._constants[value]))
        from torch._C._dynamo import guards

        base, tensor = self._like[value]
        view = change(tensor)
        if view.dtype != tensor.dtype:
            text = base = f"{value}.view({self.constant(view.dtype)})"
        else:
            self._constants["part"] = guards._reinterpret_tensor  # type: ignore[attr-defined]
            text = f"part({base}, {tuple(view.shape)}, {view.stride()}, {view.storage_offset()})"
        self._like[text] = base, view
        return text

    def address(self, value: str) -> str:
        """The code of a tensor's address."""
        kept = self._constants.get(value)
        return f"{value}.data_ptr()" if kept is None else self.constant(kept.data_ptr())

    def function(self, parameters: Sequence[str], lines: Iterable[str]) -> Callable[..., Any]:
        """Return a function that has these parameters, and these lines of code as its body."""
        text = "\n    ".join([f"def call({', '.join(parameters)}):", *lines])
        names = dict(self._constants)
        exec(compile(text, "<calls of a plan>", "exec"), names)
        return names.pop("call")  # or its globals would keep the function, and so the workspace, alive
