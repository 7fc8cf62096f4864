"""Time all arms of the comparison on one operator. A GPU worker runs ``measure_operator`` as a task."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.comparison.competitors import REFERENCE_ARM, entries
from coda_agent.comparison.competitors.entry import Given, Prepared
from coda_agent.comparison.interleaved import PreparedArm, Stage, run_interleaved
from coda_agent.primitives.system.workers import Job
from coda_agent.verifier.gpu.benchmark import sets_wanted
from coda_agent.verifier.report import QuackTuned
from coda_agent.verifier.spec.model import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from coda_agent.primitives.runtime.launch import Kernel


@dataclass(frozen=True)
class OperatorArms:
    """A session's request: an operator, its sizes, and the arms, including the reference arm. ``kernels``:
    accepted kernels by arm. ``quack``: known schedules of QuACK's arms."""

    spec: Spec
    sizes: Mapping[str, int]
    arms: tuple[str, ...]
    kernels: Mapping[str, Kernel]
    rounds: int
    quack: QuackTuned | None = None

    def compiles(self) -> Iterator[Callable[[], list[Job]]]:
        from coda_agent.verifier.baselines.quack import ARMS, to_compile

        for arm in self.arms:
            if arm in self.kernels:
                yield partial(self.kernels[arm].compile_jobs, self.sizes)
            elif arm in ARMS:
                yield partial(to_compile, arm, self.spec, self.sizes, self.quack)

    def tunes(self) -> Iterator[Callable[[], object]]:
        from coda_agent.verifier.numerics.inputs import draw

        if new := [arm for arm in self.arms if not self._is_tuned(arm)]:
            inputs = draw(self.spec, self.sizes, secrets.randbits(48), device="cuda")
            yield from (partial(prepare, arm, self, inputs) for arm in new)

    def _is_tuned(self, arm: str) -> bool:
        from coda_agent.verifier.baselines import quack as quack_baseline

        if arm in self.kernels:
            return self.kernels[arm].is_tuned(self.sizes)
        rival = arm in quack_baseline.ARMS
        return not rival or quack_baseline.is_tuned(arm, self.spec, self.sizes, self.quack)


def measure_operator(request: OperatorArms) -> dict[str, Any]:
    """Measure one operator at one case's sizes with ``run_interleaved``. Every arm gets the same inputs."""
    return run_interleaved(partial(_Operator, request), request.arms, REFERENCE_ARM, request.rounds)


class _Operator(Stage):
    """One operator, with so many sets of inputs that no arm finds its inputs in the L2 cache."""

    def __init__(self, request: OperatorArms):
        from coda_agent.verifier.numerics import reference

        self.request = request
        self.sets = [self._drawn()]
        self.sets += [self._drawn() for _ in range(sets_wanted(self.sets[0]) - 1)]
        self.turns = len(self.sets)
        exact = reference.oracle(request.spec, self.sets[0], request.sizes)
        self.truth: Mapping[str, Tensor] = {name: self._kept(name, exact.pop(name)) for name in (*exact,)}
        self.yardstick: Mapping[str, Tensor] = reference.yardstick(request.spec, self.sets[0], request.sizes)

    def enter(self, arm: str) -> PreparedArm:
        first = self._prepared(arm, self.sets[0])
        return PreparedArm(first.call, self._losses(first.read(first.call())), first.arranged_bytes)

    def again(self, arm: str, turn: int) -> Callable[[], object]:
        return self._prepared(arm, self.sets[turn]).call

    def _kept(self, name: str, exact: Tensor) -> Tensor:
        """An output's true values. For 8-bit and 16-bit outputs, these values are rounded from fp64 to fp32,
        which is precise enough and saves memory. For example, a 70B model's logits take 8 GB in fp32."""
        return exact if self.request.spec.outputs[name].dtype == "fp32" else exact.float()

    def forget_truth(self) -> None:
        self.truth, self.yardstick = {}, {}

    def _drawn(self) -> dict[str, Tensor]:
        from coda_agent.verifier.numerics.inputs import draw

        return draw(self.request.spec, self.request.sizes, secrets.randbits(48), device="cuda")

    def _prepared(self, arm: str, inputs: Mapping[str, Tensor]) -> Prepared:
        """Prepare an arm on inputs that no other arm writes to."""
        written = self.request.spec.signature().updates.values()
        own = {name: t.clone() if name in written else t for name, t in inputs.items()}
        return prepare(arm, self.request, own)

    def _losses(self, outputs: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
        from coda_agent.verifier.numerics.error_gate import loss

        every = {n: loss(t, self.truth[n], self.yardstick[n]) for n, t in outputs.items()}
        return {n: {"relative": relative, "yardsticks": ratio} for n, (relative, ratio) in every.items()}


def prepare(arm: str, request: OperatorArms, inputs: Mapping[str, Tensor]) -> Prepared:
    """Prepare one arm on one set of inputs. Errors of the arm's library are raised unchanged."""
    from coda_agent.verifier.baselines import pytorch
    from coda_agent.verifier.baselines import quack as quack_baseline

    spec, sizes = request.spec, request.sizes
    if arm in request.kernels:
        return _launched(request.kernels[arm], inputs, sizes)
    if arm in pytorch.BASELINES:
        (call,) = pytorch.calls(arm, spec, [inputs], sizes)
        return Prepared(call, (lambda _: {}) if arm == REFERENCE_ARM else _as_given)
    if arm in quack_baseline.ARMS:
        (call,) = quack_baseline.tuned_calls(arm, spec, [inputs], sizes, request.quack).calls
        return Prepared(call, _as_given)
    return entries(arm)[spec.name].build(Given(inputs, sizes, spec.constants))


def _as_given(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs


def _launched(kernel: Kernel, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Prepared:
    plan = copy(kernel).plan(inputs, sizes)  # a new plan, so that each set of inputs has its own workspace
    outputs = plan.in_place(inputs)
    return Prepared(partial(plan.run, inputs, outputs), lambda _: outputs)
