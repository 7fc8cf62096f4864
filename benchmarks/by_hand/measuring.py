"""Build the layer that calls accepted kernels one by one, on known schedules. Benchmarks time this layer
together with the comparison's variants of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from benchmarks.by_hand.layer import HandArranged, unrotated
from benchmarks.by_hand.runners import KernelCall, Launched, Runner, calls
from coda_agent.comparison import kernels as accepted
from coda_agent.comparison import layers
from coda_agent.comparison.competitors import PROGRAM
from coda_agent.comparison.layers.layer import Layer
from coda_agent.comparison.layers.shape import WIDTHS, Drawn, Shape
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.runtime import tune
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system import workers
from coda_agent.primitives.system.files import SPECS
from coda_agent.verifier.baselines.pytorch import under_compile
from coda_agent.verifier.incumbent import worth_racing
from coda_agent.verifier.loading import load
from coda_agent.verifier.spec.model import Spec

FEW = 4  # at sizes without a report, time this many of the fastest schedules, and the best of each tile


def variant(name: str, shape: Shape, drawn: Drawn, runner: Runner) -> Layer[Any, Any]:
    """A variant of the comparison, or the layer arranged by hand with kernels run by ``runner``."""
    if name == PROGRAM:
        turned_back = under_compile(unrotated, "default")
        return HandArranged(shape, drawn.weights, drawn.next_norm, runner, turned_back)
    return layers.variant(name, shape, drawn)


def known_kernels(width: str) -> dict[KernelCall, Kernel]:
    """The accepted kernels of a layer of this width, by call. Raises LookupError if some operator has no
    kernel for the installed package versions."""
    found = {}
    for call in calls(WIDTHS[width]).values():
        spec = _spec(call)
        made = accepted.by_arm(spec, dict(call.sizes)).get(PROGRAM)
        if made is None:
            why = accepted.outdated(spec, edited=False) or "no accepted kernel"
            raise LookupError(f"{call.operator}: {why}")
        found[call] = on_known_schedules(call, made, width)
    return found


def compiled(kernels: Mapping[KernelCall, Kernel]) -> Launched:
    """Compile the kernels in parallel; return a runner that launches them."""
    workers.run_jobs(job for call, kernel in kernels.items() for job in kernel.compile_jobs(dict(call.sizes)))
    return Launched({call: copy(kernel) for call, kernel in kernels.items()})


def on_known_schedules(call: KernelCall, kernel: Kernel, case: str) -> Kernel:
    """Return a kernel that needs no full search for schedules, which would take minutes. If the kernel's
    report has no schedules at the call's sizes, tuning tries only the schedules that were best when the
    kernel was last tuned at ``case``."""
    if kernel.source.schedules:
        return kernel
    kept = accepted.accepted_kernel(_spec(call), edited=False)
    if kept is None or case not in kept.schedules:
        return kernel
    raced = worth_racing(kept.schedules[case], kept.finalists.get(case, {}))
    gemms = {gemm.step: gemm for gemm in lower(kernel.program).gemms}
    known = {}
    for step, found in raced.items():
        # Include the best schedule of each of the best tiles. If the known schedules had too few tiles,
        # tuning would time every tile.
        few = list(dict.fromkeys([*found[:FEW], *tune.leaders(found)]))
        known[step] = tune.revisited(gemms[step], dict(call.sizes), few, ())
    return Kernel(kernel.source, known=known)


def _spec(call: KernelCall) -> Spec:
    return load(SPECS / f"{call.operator}.yaml", check=False)
