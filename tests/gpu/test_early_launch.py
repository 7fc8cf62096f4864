"""Tests on an H100: finishing kernels start before their GEMM ends, and no call reads another call's partial
reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from authoring import SPECS

from coda_agent.fused import programs
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.verifier.gpu.checks import bits
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics.inputs import draw

CALLS, SETS = 60, 3
ROWS, WIDTH = 16384, 256  # with many rows and few columns, the finishing kernel takes as long as its GEMM
SCHEDULES = [
    Schedule(128, 128, True, 2, 1),
    Schedule(64, 64, True, 1, 2),
    Schedule(128, 128, True, 2, 2, split=True),
]

Tensors = Mapping[str, torch.Tensor]


# the accepted kernels that have a finishing kernel
PROGRAMS = {
    name: program
    for name, (program, _) in programs.accepted().items()
    if any(vector.name.startswith("Finish") for vector in lower(program).vectors)
}


@dataclass(frozen=True)
class Calls:
    """A plan, sets of inputs, and the expected outputs for each set. The expected outputs come from a call
    that runs alone."""

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
                bits(tensor).fill_(-1)
        return made

    def expect(self, outputs: Sequence[Tensors]) -> None:
        torch.cuda.synchronize()
        for number, got in enumerate(outputs):
            want = self.expected[number % SETS]
            wrong = [n for n in want if not torch.equal(bits(got[n]), bits(want[n]))]
            assert not wrong, (number, wrong)


def cases() -> list[tuple[str, Schedule]]:
    """The kernels with the schedules that their steps admit: a step over experts has no second launch."""
    return [
        (name, schedule)
        for name, program in PROGRAMS.items()
        for schedule in SCHEDULES
        if not schedule.split or all(gemm.splittable for gemm in lower(program).gemms)
    ]


def label(case: tuple[str, Schedule]) -> str:
    name, schedule = case
    return f"{name}-{schedule.tile_m}x{schedule.tile_n}{' twice' * schedule.split}"


@pytest.fixture(scope="module", params=cases(), ids=label)
def calls(request: pytest.FixtureRequest) -> Calls:
    name, schedule = request.param
    spec, program = load(SPECS / f"{name}.yaml", check=False), PROGRAMS[name]
    sizes = {dim: ROWS if dim in ("M", "T") else WIDTH for dim in spec.dims}
    plan = Plan(KernelSource(program, {gemm.step: schedule for gemm in lower(program).gemms}), sizes)
    sets = [draw(spec, sizes, seed, device="cuda") for seed in range(SETS)]
    expected = []
    for inputs in sets:
        plan(inputs)  # a second call that read its partial sums too early would read these, which are equal
        torch.cuda.synchronize()
        expected.append(plan(inputs))
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
def test_calls_in_a_row_leave_the_bits_of_a_call_alone(
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
            bits(tensor).fill_(-1)
    calls.expect(copies)
