"""Tests on an H100: finishing kernels start before their GEMM ends, and no call reads another call's partial
reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.early_launch import ChosenLaunch, accepted, names, words
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.verifier.numerics.inputs import draw

CALLS, SETS = 60, 3
ROWS, WIDTH = 16384, 256  # with many rows and few columns, the finishing kernel takes as long as its GEMM
SCHEDULES = [
    Schedule(128, 128, True, 2, 1),
    Schedule(64, 64, True, 1, 2),
    Schedule(128, 128, True, 2, 2, split=True),
]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Calls:
    """A plan, sets of inputs, and the expected outputs for each set. The expected outputs come from an
    ordinary launch, in which no finishing kernel starts early."""

    plan: Plan
    sets: Sequence[Tensors]
    expected: Sequence[Tensors]

    def run(self, outputs: Sequence[Tensors]) -> None:
        """Call the plan on one set of inputs after another, without waiting for the GPU."""
        for number, each in enumerate(outputs):
            self.plan.run(self.sets[number % SETS], each)

    def fresh(self, number: int) -> list[Tensors]:
        """Return poisoned outputs for ``number`` calls."""
        made: list[Tensors] = [self.plan.outputs() for _ in range(number)]
        for each in made:
            for tensor in each.values():
                words(tensor).fill_(0xFF)
        return made

    def expect(self, outputs: Sequence[Tensors]) -> None:
        torch.cuda.synchronize()
        for number, got in enumerate(outputs):
            want = self.expected[number % SETS]
            wrong = [n for n in want if not torch.equal(words(got[n]), words(want[n]))]
            assert not wrong, (number, wrong)


@pytest.fixture(scope="module", params=names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SCHEDULES, ids=lambda s: f"{s.tile_m}x{s.tile_n}{' twice' * s.split}")
def calls(name: str, request: pytest.FixtureRequest) -> Calls:
    spec, program = accepted(name)
    sizes = dict.fromkeys(spec.dims, WIDTH) | {"M": ROWS}
    kernel = ChosenLaunch(program, {gemm.step: request.param for gemm in lower(program).gemms})
    plan, ordinary = Plan(kernel, sizes), Plan(replace(kernel, early=False), sizes)
    sets = [draw(spec, sizes, seed, device="cuda") for seed in range(SETS)]
    expected = []
    for inputs in sets:
        torch.cuda.synchronize()
        expected.append(ordinary(inputs))
    torch.cuda.synchronize()
    return Calls(plan, sets, expected)


def one_stream(calls: Calls, outputs: Sequence[Tensors]) -> None:
    calls.run(outputs)


def two_streams(calls: Calls, outputs: Sequence[Tensors]) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number, each in enumerate(outputs):
        with torch.cuda.stream(streams[number % 2]):
            calls.plan.run(calls.sets[number % SETS], each)


def a_graph(calls: Calls, outputs: Sequence[Tensors]) -> None:
    calls.plan.run(calls.sets[0], outputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.run(outputs)
    for _ in range(3):
        graph.replay()


@pytest.mark.parametrize("launched", [one_stream, two_streams, a_graph], ids=lambda f: f.__name__)
def test_calls_in_a_row_leave_the_bits_of_an_ordinary_launch(
    calls: Calls, launched: Callable[[Calls, Sequence[Tensors]], None]
) -> None:
    outputs = calls.fresh(CALLS)
    launched(calls, outputs)
    calls.expect(outputs)


def test_the_next_kernel_on_the_stream_reads_finished_vectors(calls: Calls) -> None:
    """Directly after each call, a PyTorch kernel copies the outputs. This copy must read finished outputs,
    although it is not one of our kernels."""
    outputs, copies = calls.fresh(CALLS), list[Tensors]()
    for number, each in enumerate(outputs):
        calls.plan.run(calls.sets[number % SETS], each)
        copies.append({name: tensor.clone() for name, tensor in each.items()})
        for tensor in each.values():
            words(tensor).fill_(0xFF)
    calls.expect(copies)
