"""Launching without tuning: a program's plans by device, shapes and dtypes. Only the latest stay in
memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from coda_agent.fused import schedules
from coda_agent.fused.programs import Typed
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import solve_sizes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launchable import ALIGNMENT, LaunchError, check_sizes, dense
from coda_agent.primitives.target import TARGET

MOST_PLANS = 256


class Plans:
    """At most ``most`` plans, the ones used last. Any threads may ask; one makes a plan, others wait for it.

    Processes of a node share compiled objects: QuACK's cache locks each while one process compiles it.
    """

    def __init__(self, most: int = MOST_PLANS):
        self.most = most
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._making, self._looking = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, program: Program, inputs: Mapping[str, Any], names: Sequence[str]) -> Plan:
        """The plan for tensors like these. LaunchError for what cannot be launched on."""
        device = inputs[names[0]].device
        key = (id(program), device, *(inputs[n].shape for n in names))  # programs are kept, by typed()
        found = self._found(key)
        if found is None:
            with self._making:
                found = self._found(key) or self._made(program, inputs, device)
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

    def _made(self, program: Program, inputs: Mapping[str, Any], device: torch.device) -> Plan:
        shapes = {n: v.shape if isinstance(v, Tensor) else () for n, v in inputs.items()}
        try:
            sizes = solve_sizes(program.signature, shapes)
        except ValueError as error:
            raise LaunchError(f"{program.signature.name}: {error}") from None
        check_sizes(program, sizes)
        return self.plan(program, sizes, device)

    def plan(self, program: Program, sizes: Mapping[str, int], device: torch.device) -> Plan:
        """A new plan at these sizes, on the schedules that are known to be good nearby."""
        gpu = torch.cuda.get_device_name(device)
        if torch.cuda.get_device_capability(device) != TARGET.capability:
            raise LaunchError(f"{program.signature.name}: {gpu} is no Hopper GPU, which they are for")
        chosen = schedules.chosen(program, sizes, gpu, schedules.known())
        return Plan(KernelSource(program, chosen), sizes, device)


plans = Plans()


@lru_cache(maxsize=256)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def launchable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where bulk copies do not take its strides or address."""
    tensor = dense(tensor.contiguous())
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def launch(
    how: Typed, inputs: Mapping[str, Any], names: Sequence[str], outputs: Sequence[str]
) -> list[Tensor]:
    """Fresh outputs, on the current stream of the tensors' one device. LaunchError."""
    program = how.program
    if how.wide:
        raise LaunchError(f"{program.signature.name}: matrices are fp32; on a GPU they are bf16 or fp16")
    device = inputs[names[0]].device
    for name in names:
        if inputs[name].device != device:
            raise LaunchError(f"{program.signature.name}: {name} is on {inputs[name].device}, not {device}")
    with torch.cuda.device(device):
        taken = {
            n: launchable(v) if isinstance(v, Tensor) else _scalar(float(v), device)
            for n, v in inputs.items()
        }
        made = plans.get(program, taken, names)(taken)
    return [made[name] for name in outputs]
