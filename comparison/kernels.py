"""Find the accepted kernels that a comparison measures, and the known schedules of these kernels."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from coda_agent.agent.storage import kernel_files
from coda_agent.comparison.competitors import EDITED, PROGRAM
from coda_agent.primitives.compiler.lower import PACKAGES
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.target import TARGET, Machine
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from coda_agent.primitives.runtime.launch import Kernel


def by_arm(spec: Spec, sizes: Mapping[str, int]) -> dict[str, Kernel]:
    """Map each arm to the operator's accepted kernel for this arm. A kernel has the schedules that were tuned
    at these sizes, if any; otherwise the kernel is tuned later. Tuning of edited code tries only the
    schedules in the code's report, because the code was checked with no other schedules."""
    found = {PROGRAM: accepted_kernel(spec, edited=False), EDITED: accepted_kernel(spec, edited=True)}
    return {arm: _kernel(spec, kept, sizes) for arm, kept in found.items() if kept}


def accepted_kernel(spec: Spec, *, edited: bool) -> Incumbent | None:
    """An operator's accepted kernel with the schedules of its report. None if no kernel is accepted, or if
    the installed packages lower the program to code other than the measured code. Raises KernelError."""
    found = kernel_files.read(spec, edited=edited)
    if found is None or not _as_measured(found):
        return None
    return Incumbent.of(found.kernel, found.report.timings)


def outdated(spec: Spec, *, edited: bool) -> str | None:
    """Say why ``accepted_kernel`` rejects an operator's accepted kernel, and what the user can do. None if
    ``accepted_kernel`` returns a kernel, or if no kernel is accepted. Raises KernelError."""
    found = kernel_files.read(spec, edited=edited)
    if found is None or _as_measured(found):
        return None
    made = {name: found.report.identity.versions.get(name, "unknown") for name in PACKAGES}
    here = {name: version(name) for name in PACKAGES}
    again = "measure and accept it again"
    if made == here:
        return f"its program no longer lowers to the accepted code: {again}"
    then, now = (", ".join(f"{n} {number}" for n, number in each.items()) for each in (made, here))
    wanted = " ".join(f"{name}=={number}" for name, number in made.items())
    return f"it was accepted with {then}, but {now} is installed: pip install {wanted}, or {again}"


def written(spec: Spec) -> Program:
    """The program that a model wrote for an operator. ``accepted_kernel`` may reject this program."""
    with kernel_files.consistent_files(spec.name) as (_, program, *_):
        return Program.from_json(program.read_text(encoding="utf-8"), spec.signature())


def machine(ceilings: Mapping[str, float]) -> Machine:
    """The target GPU's figures, with the measured peak rates ``ceilings`` in place of the nominal rates."""
    gpu = TARGET.machine
    measured = {
        name: getattr(gpu, name)._replace(value=value, source="measured") for name, value in ceilings.items()
    }
    return gpu._replace(**measured)


def _as_measured(found: kernel_files.AcceptedKernel) -> bool:
    """Whether the installed packages lower the kernel to the code that was measured."""
    return found.kernel.lowered.hash == found.report.identity.lowered_hash


def _kernel(spec: Spec, kept: Incumbent, sizes: Mapping[str, int]) -> Kernel:
    from coda_agent.primitives.runtime.launch import Kernel

    for case in spec.cases:
        if case.name in kept.schedules and dict(case.sizes) == dict(sizes):
            return Kernel(kept.kernel.on(kept.schedules[case.name]))
    return Kernel(kept.kernel, known=kept.proved if kept.kernel.edited else None)
