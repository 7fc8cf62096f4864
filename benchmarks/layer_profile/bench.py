"""Time and profile the layers of one width on the GPU, while NVML records the GPU's state. The layers are
built as in the comparison."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.by_hand import measuring as by_hand
from benchmarks.layer_profile.traces import operators, regions, summary
from coda_agent.primitives.compiler.roofline import roofline
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import tune
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.verifier.gpu.benchmark import milliseconds, timed
from coda_agent.verifier.gpu.telemetry import Monitor
from coda_agent.verifier.timing import Arm

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.by_hand.runners import KernelCall
    from coda_agent.comparison.layers.layer import Layer
    from coda_agent.comparison.layers.shape import Shape

SEED = 20
ROUNDS, LONGEST = 40, 8.0  # rounds of timing, and the limit on their seconds
KEPT, SETTLE = 20, 1.0  # profiled rounds that are kept, and seconds of warm-up before them
SUSTAINED = 3.0  # seconds of repetition that NVML records, after an equally long warm-up
HEAD_START = 200_000  # cycles of the marker kernel before a profiled region, so that the host can run ahead


@dataclass
class Backward:
    """Calls only the backward of a layer. ``ready`` runs the forward, and must be called before each
    backward."""

    layer: Layer[Any, Any]
    stream: Any
    dout: Tensor
    saved: Any = None

    def ready(self) -> None:
        self.saved = self.layer.train(self.stream)[1]

    def __call__(self) -> None:
        saved, self.saved = self.saved, None
        self.layer.backward(saved, self.dout)

    def arms(self, name: str) -> list[Arm]:
        """The layer's passes as arms."""
        return [
            Arm(f"{name}: forward", partial(self.layer.forward, self.stream)),
            Arm(f"{name}: forward and backward", partial(self.layer.step, self.stream, self.dout)),
            Arm(f"{name}: backward", self, self.ready),
        ]


class LayerStages:
    """The stages that measure one width. ``measuring.ProfileStages`` describes each stage."""

    def __init__(self, width: str, arms: Sequence[str]):
        self.width, self.names = width, tuple(arms)
        self.layers: dict[str, Layer[Any, Any]] = {}
        self.backwards: dict[str, Backward] = {}

    def prepare(self) -> dict[str, Any]:
        from coda_agent.comparison.layers.shape import WIDTHS, draw

        shape, kernels = WIDTHS[self.width], by_hand.known_kernels(self.width)
        drawn, runner = draw(shape, SEED), by_hand.compiled(kernels)
        for name in self.names:
            layer = by_hand.variant(name, shape, drawn, runner)
            layer.forward(layer.start(drawn.x))  # compiles the inference graph
            self.layers[name] = layer
            self.backwards[name] = Backward(layer, layer.start(drawn.x), drawn.dout)
        found = {"sizes": sizes(shape), "agreement": self._agreement(drawn)}
        return found | {"ours": backward_parts(shape, kernels), "seed": SEED}

    def _agreement(self, drawn: Any) -> dict[str, dict[str, float]]:
        """For each arm except the first, the error of each result relative to the first arm's result."""
        from coda_agent.comparison.layers.errors import relative, results

        first, *others = self.names
        exact = results(self.layers[first], drawn)
        return {name: relative(results(self.layers[name], drawn), exact) for name in others}

    def times(self) -> dict[str, Any]:
        arms = [arm for name, backward in self.backwards.items() for arm in backward.arms(name)]
        samples, conditions = timed(arms, ROUNDS, longest=LONGEST)
        return {"times": {n: milliseconds(s) for n, s in samples.items()}, "times_conditions": conditions}

    def kernels(self) -> dict[str, Any]:
        """Profile the arms interleaved; the first rounds heat the GPU and are dropped."""
        begun = time.monotonic()
        self._turn()
        _synchronize()
        warm = min(40, max(3, round(SETTLE / (time.monotonic() - begun))))
        with Monitor() as monitor:
            trace = record(partial(self._turns, warm + KEPT, monitor.sample))
            conditions = monitor.summary()
        arms = len(self.names)
        found = regions(trace, (warm + KEPT) * arms)[warm * arms :]
        told = {name: summary(found[place::arms]) for place, name in enumerate(self.names)}
        return {"backward": told, "backward_conditions": conditions}

    def operators(self) -> dict[str, Any]:
        trace = record(self._turn, shapes=True)
        found = regions(trace, len(self.names))
        return {
            "operators": {
                name: operators(trace, region) for name, region in zip(self.names, found, strict=True)
            }
        }

    def _turns(self, number: int, sample: Callable[[], None]) -> None:
        for _ in range(number):
            self._turn()
            sample()

    def _turn(self) -> None:
        import torch

        for backward in self.backwards.values():
            backward.ready()
            torch.cuda._sleep(HEAD_START)
            backward()
            torch.cuda._sleep(1)

    def clocks(self) -> dict[str, Any]:
        found = {}
        for name, each in self.backwards.items():
            found[name] = sustained(partial(each.layer.step, each.stream, each.dout))
        return {"sustained": found}

    def close(self) -> None:
        import torch

        self.layers, self.backwards = {}, {}
        gc.collect()
        torch.cuda.empty_cache()


def sustained(step: Callable[[], object]) -> dict[str, Any]:
    """Repeat one arm. Return the milliseconds of each forward and backward, and the GPU's telemetry."""
    import torch

    begun = time.monotonic()
    spans: list[tuple[float, Any, Any]] = []
    with Monitor() as monitor:
        while (spent := time.monotonic() - begun) < 2 * SUSTAINED:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            if spans:
                spans[-1][2].synchronize()  # the host stays one step ahead
            if spent > SUSTAINED:
                monitor.sample()
            spans.append((spent, start, stop))
        _synchronize()
        taken = [round(a.elapsed_time(b), 6) for spent, a, b in spans if spent > SUSTAINED]
        return {"milliseconds": taken, "conditions": monitor.summary()}


def record(run: Callable[[], object], *, shapes: bool = False) -> dict[str, Any]:
    """The Chrome trace of the kernels that ``run`` launches. If ``shapes`` is true, the trace also contains
    the operators that launch the kernels, with the shapes of the operators' inputs."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if shapes else [])]
    with profile(activities=activities, record_shapes=shapes) as profiler:
        run()
        _synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    return found


def backward_parts(shape: Shape, kernels: Mapping[KernelCall, Kernel]) -> list[dict[str, Any]]:
    """List the kernels of our backward in launch order, with names, schedules, FLOPs and compulsory bytes."""
    from benchmarks.by_hand.runners import calls

    return [
        part
        for place, call in calls(shape).items()
        if place.endswith("_backward")
        for part in _parts(place, call, kernels[call])
    ]


def _parts(place: str, call: KernelCall, kernel: Kernel) -> Iterator[dict[str, Any]]:
    at = dict(call.sizes)
    chosen = _chosen(kernel, at)
    lowered = kernel.source.lowered
    names = {("gemm", k.step): k.name for k in lowered.gemms}
    names |= {("vector", k.step): k.name for k in lowered.vectors}
    for floor in roofline(kernel.program._replace(schedule=chosen), at).steps:
        yield {
            "place": place,
            "operator": call.operator,
            "kind": floor.kind,
            "kernel": names[floor.kind, floor.step],
            "flops": floor.flops,
            "bytes": floor.bytes,
            "schedule": chosen[floor.step].to_json()
            if floor.kind == "gemm" and floor.step in chosen
            else None,
        }


def _chosen(kernel: Kernel, at: Mapping[str, int]) -> dict[int, Schedule]:
    """The schedule of each step, from the kernel's report or from tuning on this machine."""
    raced = {} if kernel.source.schedules else tune.cached(kernel.source, at, kernel.known) or {}
    return {**raced, **kernel.source.fixed}


def sizes(shape: Shape) -> dict[str, int]:
    return {
        "tokens": shape.tokens,
        "width": shape.width,
        "ffn": shape.ffn,
        "heads": shape.heads,
        "sequences": shape.sequences,
        "length": shape.length,
    }


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()
