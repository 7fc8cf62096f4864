"""Launch programs without tuning. Each launch needs a plan: the program with its schedules, bound to sizes
and a device. Plans are cached by device, shapes and dtypes; only recently used plans stay in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from coda_agent.fused import schedules
from coda_agent.fused.programs import Typed
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.executable import Plan, on_device, picker
from coda_agent.primitives.runtime.familiar import FamiliarPlans
from coda_agent.primitives.runtime.launch import NONE
from coda_agent.primitives.runtime.launchable import (
    ALIGNMENT,
    LaunchError,
    check_offsets,
    check_sizes,
    dense,
)
from coda_agent.primitives.target import TARGET

MOST_PLANS = 256


class Plans:
    """A cache of at most ``most`` plans: those that were used most recently. Any thread may ask for a plan.
    One thread at a time creates a plan, while other threads that need a new plan wait.

    The processes of a node share compiled objects in QuACK's cache. The cache locks an object while one
    process compiles it.
    """

    def __init__(self, most: int = MOST_PLANS):
        self.most = most
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._making, self._looking = threading.Lock(), threading.Lock()

    def clear(self) -> None:
        """Forget all plans."""
        with self._looking:
            self._plans.clear()

    def get(
        self,
        program: Program,
        inputs: Mapping[str, Any],
        names: Sequence[str],
        dims: Mapping[str, int] = NONE,
    ) -> Plan:
        """Return the plan for tensors of these shapes. ``names``: the tensors among the ``inputs``. ``dims``:
        the values of dims that no shape determines. Raises LaunchError if the program cannot run on these
        tensors."""
        device = inputs[names[0]].device
        shapes = (inputs[n].shape for n in names)
        # no other program gets this id, because ``Op.typed`` keeps all its programs alive
        key = (id(program), device, *shapes, *dims.items())
        found = self._found(key)
        if found is None:
            with self._making:
                found = self._found(key) or self._made(program, inputs, dims, device)
                with self._looking:
                    self._plans[key] = found
                    while len(self._plans) > self.most:
                        self._plans.popitem(last=False)
        return found

    def _found(self, key: tuple[Any, ...]) -> Plan | None:
        with self._looking:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
            return found

    def _made(
        self, program: Program, inputs: Mapping[str, Any], dims: Mapping[str, int], device: torch.device
    ) -> Plan:
        shapes = {n: v.shape if isinstance(v, Tensor) else () for n, v in inputs.items()}
        try:
            sizes = solve_sizes(program.signature, shapes, dims)
        except ValueError as error:
            raise LaunchError(f"{program.signature.name}: {error}") from None
        check_sizes(program, sizes)
        return self.plan(program, sizes, device)

    def plan(self, program: Program, sizes: Mapping[str, int], device: torch.device) -> Plan:
        """A new plan at these sizes, with the schedules that were fastest at similar sizes."""
        gpu = torch.cuda.get_device_name(device)
        if torch.cuda.get_device_capability(device) != TARGET.capability:
            raise LaunchError(f"{program.signature.name}: {gpu} is not a Hopper GPU, which the kernels need")
        chosen = schedules.chosen(program, sizes, gpu, schedules.known())
        return Plan(KernelSource(program, chosen), sizes, device)


plans = Plans()
_launchers: WeakSet[Launcher] = WeakSet()


def choose_again() -> None:
    """Forget all plans, so that the next calls choose schedules from the current tables."""
    plans.clear()
    for launcher in _launchers:
        launcher._familiar = FamiliarPlans()


@lru_cache(maxsize=256)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def launchable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if TMA does not accept its strides or address."""
    tensor = dense(tensor.contiguous())
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


class Launcher:
    """Launches the operator of a program. ``order``: the names of the operator's arguments. In a call, these
    arguments come first, then the dims that no shape determines. If the arguments are like those of a recent
    call, they are not checked again. Without ``overwrites``, a call first copies the inputs that the program
    updates."""

    def __init__(
        self, program: Program, order: Sequence[str], outputs: Sequence[str], overwrites: bool = False
    ):
        signature = program.signature
        self.order, self.outputs, inputs = order, outputs, signature.inputs
        self.names = tuple(n for n in order if n in inputs and inputs[n].shape)
        self._numbers = [i for i, t in enumerate(inputs.values()) if not t.shape]
        self._copied = [] if overwrites else [[*inputs].index(n) for n in signature.updates.values()]
        self._in_order = picker([*map(order.index, inputs)])
        self._familiar = FamiliarPlans()
        _launchers.add(self)

    def again(self, arguments: Sequence[Any]) -> list[Tensor] | None:
        """Return new outputs if the arguments are like those of a recent call; otherwise return None."""
        plan = self._familiar.get(arguments)
        return None if plan is None else self._run(plan, arguments)

    def __call__(self, how: Typed, inputs: Mapping[str, Any], dims: Mapping[str, int] = NONE) -> list[Tensor]:
        """Return new outputs, computed on the current stream of the device that all tensors share. Raises
        LaunchError."""
        program, names = how.program, self.names
        if how.wide:
            raise LaunchError(
                f"{program.signature.name}: matrices are fp32; on a GPU, convert them to 16-bit first"
            )
        device = inputs[names[0]].device
        taken = {**inputs, **{n: launchable(inputs[n]) for n in names}}
        with on_device(device):
            plan = plans.get(program, taken, names, dims)
            check_offsets(program, {n: taken[n] for n in names}, dims)
        given, passed = ([*map(each.get, self.order), *dims.values()] for each in (inputs, taken))
        self._familiar.add(given, passed, plan)
        return self._run(plan, passed)

    def _run(self, plan: Plan, arguments: Sequence[Any]) -> list[Tensor]:
        inputs = [*self._in_order(arguments)]
        for i in self._numbers:
            inputs[i] = _scalar(float(inputs[i]), plan.device)
        for i in self._copied:  # update a copy, because a functional operator changes no input
            inputs[i] = inputs[i].clone()
        made = plan.call(*inputs)
        return [made[name] for name in self.outputs]
