"""Time all variants of a layer, interleaved, on the GPU. ``verifier.worker`` runs ``measure_layer`` as a
task.

A session times either the forward only, or forward and backward. The session also compares every variant's
outputs once with those of the plain layer in fp32. With a backward, it also compares the gradients.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.comparison.competitors import EAGER, FUSED
from coda_agent.comparison.interleaved import PreparedArm, Stage, run_interleaved
from coda_agent.comparison.layers import variant
from coda_agent.primitives.system.workers import Job

if TYPE_CHECKING:
    from torch import Tensor

    from coda_agent.comparison.layers.layer import Layer
    from coda_agent.comparison.layers.shape import Shape
    from coda_agent.primitives.runtime.launch import Kernel


@dataclass(frozen=True)
class LayerArms:
    """A session's request: the layer's shape, and the variants to time (``arms``). ``kernels``: the kernels
    that the variant FUSED runs, with their sizes."""

    shape: Shape
    arms: tuple[str, ...]
    kernels: Sequence[tuple[Kernel, dict[str, int]]]
    rounds: int
    backward: bool

    def compiles(self) -> Iterator[Callable[[], list[Job]]]:
        if FUSED in self.arms:
            for kernel, sizes in self.kernels:
                yield partial(kernel.compile_jobs, sizes)

    def tunes(self) -> Iterator[Callable[[], object]]:
        yield from ()


def measure_layer(request: LayerArms) -> dict[str, Any]:
    """Measure a whole layer with ``comparison.interleaved``. Each loss (RMS error) is returned twice: divided
    by the RMS of the truth (the plain layer in fp32), and divided by the loss of eager PyTorch in bf16."""
    return run_interleaved(partial(_Stage, request), request.arms, EAGER, request.rounds)


class _Stage(Stage):
    def __init__(self, request: LayerArms):
        from coda_agent.comparison.layers.errors import truth
        from coda_agent.comparison.layers.shape import draw

        self.request = request
        self.drawn = draw(request.shape, secrets.randbits(48))
        self.truth: Mapping[str, Tensor] = truth(request.shape, self.drawn, backward=request.backward)
        self.usual: dict[str, float] = {}  # the losses of eager PyTorch

    def enter(self, arm: str) -> PreparedArm:
        layer = variant(arm, self.request.shape, self.drawn)
        losses = self._losses(arm, layer)
        stream = layer.start(self.drawn.x)
        call: Callable[[], object] = partial(layer.forward, stream)
        if self.request.backward:
            call = partial(layer.step, stream, self.drawn.dout)
        return PreparedArm(call, losses, sum(t.numel() * t.element_size() for t in layer.arranged()))

    def again(self, arm: str, turn: int) -> Callable[[], object]:
        raise AssertionError("a layer's inputs are larger than the L2: there is one set of them")

    def forget_truth(self) -> None:
        self.truth = {}

    def _losses(self, arm: str, layer: Layer[Any, Any]) -> dict[str, dict[str, float]]:
        from coda_agent.comparison.layers.errors import relative, results

        found = relative(results(layer, self.drawn, backward=self.request.backward), self.truth)
        if arm == EAGER:
            self.usual = found
        return {n: {"relative": loss, "yardsticks": loss / self.usual[n]} for n, loss in found.items()}
