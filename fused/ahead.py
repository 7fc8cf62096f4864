"""Compile kernels ahead of time into QuACK's cache, where the first call of a kernel finds the object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from coda_agent.fused import ops, schedules
from coda_agent.primitives.compiler.jit import compile_object
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launchable import check_sizes
from coda_agent.primitives.runtime.precompile import to_compile
from coda_agent.primitives.system.workers import run_jobs

H100 = "NVIDIA H100 80GB HBM3"  # on a machine without a GPU, ``build`` compiles for this GPU


class Bound(NamedTuple):
    """A program with the sizes at which it runs."""

    program: Program
    sizes: dict[str, int]


class Build(NamedTuple):
    """A program that ``build`` has compiled at some sizes. ``refused``: the steps that the compiler refused
    to compile at their schedules."""

    name: str
    sizes: dict[str, int]
    schedules: dict[int, Schedule]
    refused: list[int]


def called(call: Callable[[], Any]) -> list[Bound]:
    """Run ``call``, and return the distinct programs whose operators it calls, with their sizes. ``call``
    must use tensors on the meta device, so that nothing is computed."""
    found: dict[tuple[Program, tuple[tuple[str, int], ...]], None] = {}

    def note(program: Program, sizes: Mapping[str, int]) -> None:
        found[program, tuple(sizes.items())] = None

    ops.watchers.append(note)
    try:
        call()
    finally:
        ops.watchers.remove(note)
    return [Bound(program, dict(sizes)) for program, sizes in found]


def build(wanted: Iterable[Bound]) -> list[Build]:
    """Compile these programs in parallel, with the schedules of ``on_schedules``. Objects in the cache are
    not compiled again. Raises LaunchError for sizes at which a program cannot be launched."""
    jobs, kernels = list[Any](), list[tuple[KernelSource, dict[str, int]]]()
    for bound in wanted:
        kernel = on_schedules(bound)
        jobs += to_compile(kernel, bound.sizes, kernel.schedules.items())
        kernels.append((kernel, bound.sizes))
    run_jobs(jobs)
    return [_built(kernel, sizes) for kernel, sizes in kernels]


def on_schedules(bound: Bound) -> KernelSource:
    """The program with the schedules that a call on this machine's GPU would choose; on a machine without a
    GPU, those of an H100. Raises LaunchError as ``build`` does."""
    program, sizes = bound
    check_sizes(program, sizes)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else H100
    return KernelSource(program, schedules.chosen(program, sizes, gpu, schedules.known()))


def _built(kernel: KernelSource, sizes: dict[str, int]) -> Build:
    lowered, chosen = kernel.lowered, dict(kernel.schedules)
    refused = [g.step for g in lowered.gemms if not compile_object(lowered, g, chosen[g.step], sizes)]
    return Build(kernel.program.signature.name, sizes, chosen, refused)


def training(model: Any, sequences: int, length: int) -> Callable[[], Any]:
    """Return a function that runs one training step of a patched Hugging Face model on the meta device."""

    def call() -> None:
        given = _given(sequences, length)
        model.train()(**given, labels=given["input_ids"], use_cache=False).loss.backward()

    return call


def inference(model: Any, sequences: int, length: int) -> Callable[[], Any]:
    """Return a function that runs a patched model on a prompt, then on one more token per sequence."""

    @torch.no_grad()
    def call() -> None:
        for each in (length, 1):
            model.eval()(**_given(sequences, each), use_cache=False)

    return call


def _given(sequences: int, length: int) -> dict[str, torch.Tensor]:
    """A model's inputs on the meta device. They include a 4-D attention mask. Without it, the model would
    make its own mask from the values of its inputs, but meta tensors have no values."""
    ids = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    mask = torch.zeros(sequences, 1, length, length, dtype=torch.bool, device="meta")
    return {"input_ids": ids, "attention_mask": mask}
