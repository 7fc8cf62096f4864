"""Recognize calls whose arguments are like the arguments of a recent call, and so need no checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.runtime.calls import CallWriter
from coda_agent.primitives.runtime.launchable import ALIGNMENT

if TYPE_CHECKING:
    from coda_agent.primitives.runtime.executable import Plan

MOST = 8  # number of calls to remember


def recognizer(passed: Sequence[Any], written: Sequence[int] = ()) -> Callable[..., bool]:
    """Return a function that tells whether its arguments are like the ``passed`` arguments, which passed all
    checks. Tensors must have the same metadata, and integers the same value; floats may differ. A call of the
    function takes half a microsecond. ``written``: the positions of tensors that the kernel overwrites. Such
    a tensor must overlap no other tensor.

    The C++ guards of ``torch.compile`` compare types, dtypes, devices, sizes and strides. If the result is
    False, the arguments may still be valid, but must be checked. For example, a call that passes one tensor
    twice is never recognized.
    """
    import torch
    from torch._C._dynamo.guards import TensorGuards

    tensors = {i: t for i, t in enumerate(passed) if isinstance(t, torch.Tensor)}
    guards = TensorGuards(*tensors.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    writer = CallWriter(passed, {"alike": guards.check, "grad_enabled": torch.is_grad_enabled})
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
    """The plans of recent calls, each with a function that recognizes the call's arguments."""

    def __init__(self, written: Sequence[int] = ()):
        self._written = written
        self._last: tuple[tuple[Callable[..., bool], Plan], ...] = ()  # newest first

    def get(self, arguments: Sequence[Any]) -> Plan | None:
        """The plan of a recent call whose arguments were like these; None if the arguments must be
        checked."""
        for recognizes, plan in self._last:
            if recognizes(*arguments):
                return plan
        return None

    def add(self, given: Sequence[Any], passed: Sequence[Any], plan: Plan) -> None:
        """Remember the plan of a call. ``given``: the caller's arguments. ``passed``: the same arguments with
        the strides that passed the checks. The plan is remembered only if the recognizer of ``passed``
        accepts ``given``: for example, both must have the same strides."""
        if (recognizes := recognizer(passed, self._written))(*given):
            self._last = ((recognizes, plan), *self._last[: MOST - 1])
