"""Recognize arguments like those of recent calls, so that a call checks only what is new to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.runtime.calls import CallWriter
from coda_agent.primitives.runtime.launchable import ALIGNMENT

if TYPE_CHECKING:
    from coda_agent.primitives.runtime.executable import Plan

MOST = 8  # calls that are remembered


def recognizer(passed: Sequence[Any], written: Sequence[int] = ()) -> Callable[..., bool]:
    """A function that recognizes, in half a microsecond, arguments like the ``passed`` ones, which passed all
    checks: tensors of the same kind and equal integers; floats may differ. ``written``: the positions of
    tensors that are overwritten, so that they may overlap no other.

    Types, dtypes, devices, sizes and strides are compared by the guards of ``torch.compile``, in C++. A
    result of False means only that the arguments must be checked. For example, a call that passes one tensor
    twice is never recognized.
    """
    import torch
    from torch._C._dynamo.guards import TensorGuards

    tensors = {i: t for i, t in enumerate(passed) if isinstance(t, torch.Tensor)}
    guards = TensorGuards(*tensors.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    writer = CallWriter(len(passed), {"alike": guards.check, "grad_enabled": torch.is_grad_enabled})
    place = {i: f"{writer.given[i]}.data_ptr()" for i in tensors}
    conditions = [f"{writer.given[i]} == {n}" for i, n in enumerate(passed) if isinstance(n, int)]
    conditions += [
        f"alike({', '.join(writer.given[i] for i in tensors)})",
        f"not ({' | '.join(place.values())}) % {ALIGNMENT}",
    ]
    if any(t.requires_grad for t in tensors.values()):
        conditions.append("not grad_enabled()")
    for one in written:
        for other, t in tensors.items():
            if other != one:
                apart = f"{place[one]} - {place[other]}"
                conditions.append(f"not {-tensors[one].nbytes} < {apart} < {t.nbytes}")
    return writer.function(writer.given, [f"return {' and '.join(conditions)}"])


class FamiliarPlans:
    """The plans of the last calls, by what their arguments are like."""

    def __init__(self, written: Sequence[int] = ()):
        self._written = written
        self._last: tuple[tuple[Callable[..., bool], Plan], ...] = ()  # newest first

    def get(self, arguments: Sequence[Any]) -> Plan | None:
        """The plan of a recent call with such arguments; None if they must be checked."""
        for known, plan in self._last:
            if known(*arguments):
                return plan
        return None

    def add(self, given: Sequence[Any], passed: Sequence[Any], plan: Plan) -> None:
        """Remember the plan of a call, unless other arguments than the ``given`` ones passed the checks."""
        if (known := recognizer(passed, self._written))(*given):
            self._last = ((known, plan), *self._last[: MOST - 1])
