"""Launch a program on CUDA tensors: build a plan once, then call it cheaply."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping, Sequence
from functools import partial
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
from coda_agent.primitives.runtime.executable import Plan, on_device, picker
from coda_agent.primitives.runtime.familiar import FamiliarPlans
from coda_agent.primitives.runtime.launchable import (
    LaunchError,
    check_offsets,
    check_sizes,
    check_tensors,
    dense,
)
from coda_agent.primitives.runtime.precompile import to_compile
from coda_agent.primitives.runtime.tune import cached, tuned_schedules
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import KERNELS, read_json

NONE: Mapping[str, int] = MappingProxyType({})


class Kernel:
    """A program as a function of CUDA tensors: ``Kernel.load("gemm_swiglu")(x=x, w=w)``.

    A call launches on the current stream of the tensors' device. The first call with new shapes tunes the
    kernel and builds a plan, which takes seconds to minutes. The tuned schedules are cached on disk. Later
    calls only launch. If the source gives a step's schedule, the step is not tuned. ``known``: good schedules
    by step. Tuning then times these schedules, and times other schedules only if the known schedules cover
    too few tiles (``tune.search_again``). Edited code is timed only on ``known`` schedules, because its
    results on other schedules are unchecked.

    Several threads and CUDA streams may call a Kernel at once. Calls with the same shapes share a workspace,
    so they run one after another on the GPU: a stream waits for the stream of the previous call. Create one
    Kernel per stream if calls should overlap.

    A call that is captured into a CUDA graph does not wait for other calls, and the graph's replays do not
    wait either. So the user must keep a replay from overlapping another replay or call. No other thread may
    call the Kernel during a capture. A stream that PyTorch did not create must stay alive until the next call
    from another stream, because that next call waits for the stream. A copied or unpickled Kernel builds its
    plans again.

    A call whose arguments are unlike the arguments of recent calls reads the offsets of experts' rows, and
    refuses wrong offsets. Other calls skip this check, because reading offsets waits for the GPU. If a call
    skips the check, wrong offsets give wrong results, but the kernel accesses no memory outside its tensors.
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
        self._in_order = picker((*signature.inputs, *signature.named))
        self._familiar = FamiliarPlans([[*signature.inputs].index(n) for n in signature.updates.values()])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), known=self.known), (self.source,)

    @classmethod
    def load(
        cls,
        kernel: str | Path,
        schedules: Mapping[int, Schedule] | None = None,
        edited: str | Path | None = None,
    ) -> Kernel:
        """Load a program from a file NAME.program.json. ``kernel``: the NAME of an accepted kernel, or the
        path of any such file.

        ``edited``: the path of a NAME.raw.py, whose code replaces the program's lowered code. A confined
        child process compiles this code. Without ``schedules``, edited code runs only on the schedules in the
        report beside the NAME.raw.py. Raises OSError, or ProgramError for an invalid program.
        """
        accepted = KERNELS / f"{kernel}.program.json"
        path = accepted if accepted.exists() else Path(kernel)
        if not path.exists():
            words = "no accepted kernel has this name, and there is no such file"
            raise FileNotFoundError(errno.ENOENT, words, str(kernel))
        program = Program.from_json(path.read_text(encoding="utf-8"))
        text = Path(edited).read_text(encoding="utf-8") if edited else None
        source = KernelSource(program, schedules or {}, text)
        return cls(source, known=_proved(source, Path(edited)) if edited else None)

    def plan(self, inputs: Mapping[str, torch.Tensor], given: Mapping[str, int] = NONE) -> Plan:
        """The plan for these inputs' shapes and device. ``given``: the sizes of dims that no shape
        determines. Raises LaunchError if the kernel cannot run on the inputs."""
        sizes = check_tensors(self.program.signature, inputs, given)
        device = next(iter(inputs.values())).device
        key = (device, *sorted(sizes.items()))
        plan = self._plans.get(key)
        if plan is None:
            check_sizes(self.program, sizes)
            with self._planning, on_device(device):  # one thread builds the plan; other threads wait for it
                plan = self._plans.get(key) or self._new_plan(inputs, sizes, device)
                self._plans[key] = plan
        return plan

    def compile_jobs(self, sizes: Mapping[str, int]) -> list[workers.Job]:
        """Jobs that compile the kernel's schedules at these sizes. For a step without a schedule, the jobs
        compile the schedules that tuning would time first."""
        fixed, known, wanted = self.source.fixed, self.known or {}, list[tuple[int, Schedule]]()
        for gemm in lower(self.program).gemms:
            step = gemm.step
            raced = [fixed[step]] if step in fixed else known.get(step) or candidates(gemm, sizes)
            wanted += [(step, schedule) for schedule in raced if gemm.admits(schedule, sizes)]
        return to_compile(self.source, sizes, wanted)

    def is_tuned(self, sizes: Mapping[str, int]) -> bool:
        """Whether every step already has a schedule at these sizes. Needs a GPU, because tunings are cached
        by the GPU's name."""
        steps = {step.index for step in cut(self.program).gemms}
        return steps <= self.source.fixed.keys() or bool(cached(self.source, sizes, self.known))

    def _new_plan(
        self, inputs: Mapping[str, torch.Tensor], sizes: Mapping[str, int], device: torch.device
    ) -> Plan:
        steps = {n for n, _ in enumerate(cut(self.program).gemms)}
        schedules = self.source.fixed
        if not steps <= schedules.keys():
            self._check_proved(sizes)
            schedules = tuned_schedules(self.source, inputs, sizes, self.known)
        return Plan(self.source.on(schedules), sizes, device)

    def _check_proved(self, sizes: Mapping[str, int]) -> None:
        """Raise LaunchError if a step of edited code has neither a given schedule nor a known schedule that
        fits these sizes."""
        for gemm in lower(self.program).gemms if self.source.edited else ():
            known = (self.known or {}).get(gemm.step, ())
            if gemm.step not in self.source.fixed and not any(gemm.admits(s, sizes) for s in known):
                raise LaunchError(
                    f"step {gemm.step}: the edited text was verified on no schedule that fits these sizes: "
                    "give schedules, or leave out edited"
                )

    def __call__(self, **inputs: Any) -> dict[str, torch.Tensor]:
        """Run the kernel; return its outputs by name. ``inputs``: tensors, and integers for the static dims
        that no shape determines. If an output updates an input, the kernel overwrites the input's tensor and
        returns this tensor as the output. Raises LaunchError if the kernel cannot run on the inputs."""
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
        """Check the inputs. Return the plan for the inputs. Also return the inputs in order, as tensors with
        the strides that the plan needs."""
        named = self.program.signature.named
        given = {dim: inputs[dim] for dim in named if dim in inputs}
        passed = {name: dense(t) if isinstance(t, torch.Tensor) else t for name, t in inputs.items()}
        tensors = {name: t for name, t in passed.items() if name not in named}
        plan = self.plan(tensors, given)
        check_offsets(self.program, tensors, given)
        arguments = self._in_order(passed)
        self._familiar.add(self._in_order(inputs), arguments, plan)
        return plan, arguments


def _proved(source: KernelSource, path: Path) -> dict[int, list[Schedule]]:
    """The schedules, by step, at which this edited code was measured. They come from the report next to the
    file. The result is empty if the folder has no report of this code."""
    report = read_json(path.with_name(f"{path.name.removesuffix('.py')}.report.json")) or {}
    if report.get("identity", {}).get("lowered_hash") != source.lowered.hash:
        return {}
    return all_by_step(by_step(timing["schedules"]) for timing in report["timings"])
