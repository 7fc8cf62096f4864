"""Launch a program on CUDA tensors: build a plan once, then call it cheaply."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
from coda_agent.primitives.runtime.executable import Plan, on_device
from coda_agent.primitives.runtime.familiar import FamiliarPlans
from coda_agent.primitives.runtime.launchable import (
    LaunchError,
    check_offsets,
    check_sizes,
    check_tensors,
    dense,
)
from coda_agent.primitives.runtime.tune import cached, to_compile, tuned_schedules
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import read_json

NONE: Mapping[str, int] = MappingProxyType({})


class Kernel:
    """A program as a function of CUDA tensors: ``Kernel.load("NAME.program.json")(x=x, w=w, ...)``.

    It launches on the current stream of the tensors' device. The first call with new shapes plans and tunes.
    This takes seconds to minutes, and the result is stored on disk. Later calls only launch. Schedules in the
    source replace tuning. ``known``: good schedules by step. Tuning then times others only if these have too
    few tiles. Edited code is timed only on ``known`` schedules, because its results on others have not been
    checked.

    Any threads and CUDA streams may call it at once. Calls with the same shapes share a workspace, so they
    run one after another on the GPU: a stream waits for the stream of the previous call. For overlapping
    calls, create one Kernel per stream. A call captured into a CUDA graph does not wait, and neither do the
    graph's replays. So replays must not overlap each other or other calls, and no other thread may call the
    Kernel during a capture. An external stream must stay alive until the next call from another stream. A
    copied or unpickled Kernel plans again.

    The first call with a new combination of tensors reads the offsets of experts' rows, and refuses wrong
    ones. Later calls do not check, so that they need not wait for the GPU. Wrong offsets then give wrong
    results, but touch no other memory.
    """

    def __init__(
        self, source: KernelSource | Program, *, known: Mapping[int, Sequence[Schedule]] | None = None
    ):
        self.source = KernelSource(source) if isinstance(source, Program) else source
        self.program, self.known = self.source.program, known
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._planning = threading.Lock()
        signature = self.program.signature
        self._number, self._updates = len(signature.inputs), tuple(signature.updates.items())
        # a tuple, because a GEMM has at least two inputs
        self._in_order = itemgetter(*signature.inputs, *signature.named)
        self._familiar = FamiliarPlans([[*signature.inputs].index(n) for n in signature.updates.values()])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), known=self.known), (self.source,)

    @classmethod
    def load(
        cls,
        path: str | Path,
        schedules: Mapping[int, Schedule] | None = None,
        edited: str | Path | None = None,
    ) -> Kernel:
        """Read a NAME.program.json. ``edited``: a NAME.raw.py, which replaces the program's own lowering and
        compiles in a confined child process. Without ``schedules``, edited code runs only on the schedules of
        the report in the same folder. Raises OSError, or ProgramError for an invalid program."""
        program = Program.from_json(Path(path).read_text(encoding="utf-8"))
        text = Path(edited).read_text(encoding="utf-8") if edited else None
        source = KernelSource(program, schedules or {}, text)
        return cls(source, known=_proved(source, Path(edited)) if edited else None)

    def plan(self, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int] = NONE) -> Plan:
        """The plan for tensors of these shapes and for dims ``given`` by name. Raises LaunchError if the
        kernel cannot run on the inputs."""
        sizes = check_tensors(self.program.signature, inputs, given)
        device = next(iter(inputs.values())).device
        key = (device, *sorted(sizes.items()))
        found = self._plans.get(key)
        if found is None:
            check_sizes(self.program, sizes)  # the sizes of existing plans are known to fit
            with self._planning, on_device(device):  # one thread plans; the others then use its plan
                found = self._plans.get(key) or self._planned(inputs, sizes, device)
                self._plans[key] = found
        return found

    def compile_jobs(self, sizes: Mapping[str, int]) -> list[workers.Job]:
        """Compile jobs for the kernel's schedules at these sizes, or for those that tuning tries first."""
        fixed, known, wanted = self.source.fixed, self.known or {}, list[tuple[int, Schedule]]()
        for gemm in lower(self.program).gemms:
            step = gemm.step
            raced = [fixed[step]] if step in fixed else known.get(step) or candidates(gemm, sizes)
            wanted += [(step, schedule) for schedule in raced if gemm.admits(schedule, sizes)]
        return to_compile(self.source, sizes, wanted)

    def is_tuned(self, sizes: Mapping[str, int]) -> bool:
        """Whether the kernel's schedules at these sizes are already chosen. This reads the GPU's name,
        because choices are stored by GPU."""
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
        """Run the kernel; return its outputs by name. An output that updates an input is that input's tensor,
        overwritten. Pass as integers the static dims that no input's shape determines. Raises LaunchError if
        the kernel cannot run on the inputs."""
        try:
            arguments = self._in_order(inputs)
        except KeyError:
            arguments = ()
        plan = self._familiar.get(arguments) if len(arguments) == len(inputs) else None
        if plan is None:
            plan, arguments = self._checked_plan(inputs)
        outputs = plan.call(*arguments[: self._number])
        for output, name in self._updates:
            outputs[output] = inputs[name]
        return outputs

    def _checked_plan(self, inputs: Mapping[str, Any]) -> tuple[Plan, tuple[Any, ...]]:
        """The plan for arguments unlike those of recent calls, and the arguments in order, with the strides
        that the plan needs."""
        named = self.program.signature.named
        given = {dim: inputs[dim] for dim in named if dim in inputs}
        passed = {name: dense(t) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        taken = {name: t for name, t in passed.items() if name not in named}
        plan = self.plan(taken, given)
        check_offsets(self.program, taken, given)
        arguments = self._in_order(passed)
        self._familiar.add(self._in_order(inputs), arguments, plan)
        return plan, arguments


def _proved(source: KernelSource, path: Path) -> dict[int, list[Schedule]]:
    """The schedules, by step, on which the report in the same folder measured this edited code; empty if no
    report is about it."""
    report = read_json(path.with_name(f"{path.name.removesuffix('.py')}.report.json")) or {}
    if report.get("identity", {}).get("lowered_hash") != source.lowered.hash:
        return {}
    return all_by_step(by_step(timing["schedules"]) for timing in report["timings"])
