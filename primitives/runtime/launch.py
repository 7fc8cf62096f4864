"""Launch a program on CUDA tensors: plan once, then call cheaply.

A ``Kernel`` checks its tensors (``launchable``), tunes its schedules (``tune``) and caches a plan for their
sizes (``executable``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.partition import cut
from coda_agent.primitives.lang.schedule import Schedule, all_by_step, by_step
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launchable import (
    Familiar,
    LaunchError,
    check_sizes,
    check_tensors,
    check_updates,
    dense,
)
from coda_agent.primitives.runtime.tune import cached, to_compile, tuned_schedules
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import read_json

FAMILIAR = 8  # kinds of tensors that a kernel recognizes without checking them
NONE: Mapping[str, int] = MappingProxyType({})
HERE = nullcontext()  # PyTorch's current device is the right one


class Kernel:
    """A program as a function of CUDA tensors: ``Kernel.load("NAME.program.json")(x=x, w=w, ...)``.

    It launches on the tensors' device, on that one's current stream. The first call with new shapes plans
    and tunes (seconds to minutes, kept on disk); later ones launch.
    The source's schedules replace tuning; with ``known`` ones, by step, tuning only races those. An edited
    text is raced over ``known`` schedules alone, since on others nobody saw that it is right.

    Any threads and CUDA streams may call it at once. Calls of the same shapes share a workspace, so they run
    one after another on the GPU: a stream waits for the stream of the previous call. For calls that overlap,
    make a Kernel for each stream. A call that is captured into a CUDA graph does not wait, and neither do the
    graph's replays: never let them overlap each other or other calls, and call from no other thread during a
    capture. An external stream must live until another stream's next call. A copied or unpickled Kernel plans
    again.
    """

    def __init__(
        self, source: KernelSource | Program, *, known: Mapping[int, Sequence[Schedule]] | None = None
    ):
        self.source = KernelSource(source) if isinstance(source, Program) else source
        self.program, self.known = self.source.program, known
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._planning = threading.Lock()
        signature = self.program.signature
        self._named = signature.named
        self._number, self._updates = len(signature.inputs), tuple(signature.updates.items())
        self._in_order = itemgetter(*signature.inputs)  # a product has two inputs at least
        # The last calls' tensors and dims, newest first.
        self._familiar: tuple[tuple[Familiar, Mapping[str, int], Plan], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), known=self.known), (self.source,)

    @classmethod
    def load(
        cls,
        path: str | Path,
        schedules: Mapping[int, Schedule] | None = None,
        edited: str | Path | None = None,
    ) -> Kernel:
        """Read a NAME.program.json and, with ``edited``, a NAME.raw.py, which is compiled in confinement and
        replaces the program's own text, on the schedules that the report beside it was measured on. Raises
        OSError, or ProgramError for an invalid program."""
        program = Program.from_json(Path(path).read_text(encoding="utf-8"))
        text = Path(edited).read_text(encoding="utf-8") if edited else None
        source = KernelSource(program, schedules or {}, text)
        return cls(source, known=_proved(source, Path(edited)) if edited else None)

    def plan(self, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int] = NONE) -> Plan:
        """The plan for tensors like these, and for dims ``given`` by name. LaunchError for inputs that cannot
        be launched on."""
        sizes = check_tensors(self.program.signature, inputs, given)
        device = next(iter(inputs.values())).device
        key = (device, *sorted(sizes.items()))
        found = self._plans.get(key)
        if found is None:
            check_sizes(self.program, sizes)  # an existing plan's sizes are known to fit
            with self._planning, on_device(device):  # one thread plans, the others use its plan
                found = self._plans.get(key) or self._planned(inputs, sizes, device)
                self._plans[key] = found
        return found

    def compile_jobs(self, sizes: Mapping[str, int]) -> list[workers.Job]:
        """Compile jobs for the schedules that it runs on at these sizes, or that tuning tries first."""
        fixed, known, wanted = self.source.fixed, self.known or {}, list[tuple[int, Schedule]]()
        for gemm in lower(self.program).gemms:
            step = gemm.step
            raced = [fixed[step]] if step in fixed else known.get(step) or candidates(gemm, sizes)
            wanted += [(step, schedule) for schedule in raced if gemm.admits(schedule, sizes)]
        return to_compile(self.source, sizes, wanted)

    def is_tuned(self, sizes: Mapping[str, int]) -> bool:
        """Whether its schedules at these sizes are known. Asks for the GPU's name."""
        steps = {step.index for step in cut(self.program).gemms}
        return steps <= self.source.fixed.keys() or bool(cached(self.source, sizes, self.known))

    def _planned(
        self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], device: torch.device
    ) -> Plan:
        steps = {n for n, _ in enumerate(cut(self.program).gemms)}
        schedules = self.source.fixed
        if not steps <= schedules.keys():
            self._expect_proved(sizes)
            schedules = tuned_schedules(self.source, inputs, sizes, self.known) | schedules
        return Plan(self.source.on(schedules), sizes, device)

    def _expect_proved(self, sizes: Mapping[str, int]) -> None:
        for gemm in lower(self.program).gemms if self.source.edited else ():
            known = (self.known or {}).get(gemm.step, ())
            if gemm.step not in self.source.fixed and not any(gemm.admits(s, sizes) for s in known):
                raise LaunchError(
                    f"step {gemm.step}: no report says that the edited text is right on a schedule which "
                    "these sizes admit: give schedules, or leave edited out"
                )

    def __call__(self, **inputs: Any) -> dict[str, torch.Tensor]:
        """Outputs by name; one that updates an input is that input's tensor, overwritten. Beside tensors it
        takes, as integers, the static dims that follow from no input's shape. LaunchError for inputs that
        cannot be launched on."""
        given = {dim: inputs.pop(dim) for dim in self._named if dim in inputs} if self._named else NONE
        plan, taken = self._known_plan(inputs, given), inputs
        if plan is None:
            plan, taken = self._checked_plan(inputs, given)
        with on_device(plan.device):
            outputs = plan.in_place(taken)
            plan.run(taken, outputs)
        for output, name in self._updates:
            outputs[output] = inputs[name]
        return outputs

    def _known_plan(self, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int]) -> Plan | None:
        """The plan of an earlier call with tensors of the same kind; None if there is none."""
        if len(inputs) != self._number:
            return None
        try:
            tensors = self._in_order(inputs)
        except KeyError:
            return None
        for familiar, dims, plan in self._familiar:
            if dims == given and familiar(tensors):
                if self._updates:
                    check_updates(self.program.signature, inputs)
                return plan
        return None

    def _checked_plan(
        self, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int]
    ) -> tuple[Plan, dict[str, torch.Tensor]]:
        """The plan for tensors that no call had yet, and the tensors as the plan takes them."""
        taken = {name: dense(t) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        plan = self.plan(taken, given)
        if (familiar := Familiar(self._in_order(taken)))(self._in_order(inputs)):
            self._familiar = ((familiar, given, plan), *self._familiar[: FAMILIAR - 1])
        return plan, taken


def _proved(source: KernelSource, path: Path) -> dict[int, list[Schedule]]:
    """By step, the schedules that an edited text was measured on by the report beside it; none without a
    report of this text."""
    report = read_json(path.with_name(f"{path.name.removesuffix('.py')}.report.json")) or {}
    if report.get("identity", {}).get("lowered_hash") != source.lowered.hash:
        return {}
    return all_by_step(by_step(timing["schedules"]) for timing in report["timings"])


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within, ``device`` is PyTorch's current one, so that a kernel goes to its stream, wherever its tensors
    are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)
