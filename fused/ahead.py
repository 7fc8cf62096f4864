"""Compiling ahead of time: what a first call would compile, into the cache that it loads from."""

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
from coda_agent.primitives.runtime.tune import to_compile
from coda_agent.primitives.system.workers import run_jobs

H100 = "NVIDIA H100 80GB HBM3"  # whose schedules a machine without a GPU builds


class Bound(NamedTuple):
    """A program at sizes."""

    program: Program
    sizes: dict[str, int]


class Build(NamedTuple):
    """What was built of a program at sizes. ``refused``: steps whose schedule the compiler refuses."""

    name: str
    sizes: dict[str, int]
    schedules: dict[int, Schedule]
    refused: list[int]


def called(call: Callable[[], Any]) -> list[Bound]:
    """The programs that the operators in ``call`` run, each once at its sizes. ``call`` uses tensors on the
    meta device, so that nothing is computed."""
    found: dict[tuple[Program, tuple[tuple[str, int], ...]], None] = {}

    def note(program: Program, sizes: Mapping[str, int]) -> None:
        found[program, tuple(sizes.items())] = None

    ops.watchers.append(note)
    try:
        call()
    finally:
        ops.watchers.remove(note)
    return [Bound(program, dict(sizes)) for program, sizes in found]


def build(wanted: Iterable[Bound], gpu: str | None = None) -> list[Build]:
    """Compile these programs on the schedules that a call on ``gpu`` (this machine's, or an H100) chooses, in
    parallel; only what the cache lacks. LaunchError for sizes at which a program cannot be launched."""
    gpu = gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else H100)
    rows, jobs, kernels = schedules.known(), list[Any](), list[tuple[KernelSource, dict[str, int]]]()
    for program, sizes in wanted:
        check_sizes(program, sizes)
        kernel = KernelSource(program, schedules.chosen(program, sizes, gpu, rows))
        jobs += to_compile(kernel, sizes, kernel.schedules.items())
        kernels.append((kernel, sizes))
    run_jobs(jobs)
    return [_built(kernel, sizes) for kernel, sizes in kernels]


def _built(kernel: KernelSource, sizes: dict[str, int]) -> Build:
    lowered, chosen = kernel.lowered, dict(kernel.schedules)
    refused = [g.step for g in lowered.gemms if not compile_object(lowered, g, chosen[g.step], sizes)]
    return Build(kernel.program.signature.name, sizes, chosen, refused)


def training(model: Any, sequences: int, length: int) -> Callable[[], Any]:
    """A step of a patched Hugging Face model on the meta device."""

    def call() -> None:
        given = _given(sequences, length)
        model.train()(**given, labels=given["input_ids"], use_cache=False).loss.backward()

    return call


def inference(model: Any, sequences: int, length: int) -> Callable[[], Any]:
    """A prompt, and a token of each sequence."""

    @torch.no_grad()
    def call() -> None:
        for each in (length, 1):
            model.eval()(**_given(sequences, each), use_cache=False)

    return call


def _given(sequences: int, length: int) -> dict[str, torch.Tensor]:
    """With a whole mask, since making one reads values."""
    ids = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    mask = torch.zeros(sequences, 1, length, length, dtype=torch.bool, device="meta")
    return {"input_ids": ids, "attention_mask": mask}
