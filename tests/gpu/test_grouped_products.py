"""Tests on an H100 of products with offsets. The tests try difficult and wrong offsets, and check that no
kernel writes outside its outputs."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from kernels import Tensors, signature, tensor, trace

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import LaunchError

ROWS, GUARD = 517, 16
SIZES = {"T": ROWS, "S": 300, "K": 264, "N": 328, "F": 200}
SCHEDULES = [Schedule(128, 128, True, 2, 1), Schedule(256, 128, False, 2, 1), Schedule(128, 192, False, 1, 2)]
X, OFFSETS, GATE = tensor("T, K"), tensor("E + 1", "int32"), tensor("T", "fp32")
PROGRAMS = {
    "pairs": trace(
        signature(
            {"x": X, "w": tensor("E, 2*F, K"), "offsets": OFFSETS},
            {"pre": tensor("T, 2*F"), "act": tensor("T, F")},
        ),
        "t = gemm(x, w.mT, offsets)",
        "even, odd = pairs(t)",
        "return {'pre': t, 'act': silu(even) * odd}",
    ),
    "loads and sums": trace(
        signature(
            {"x": X, "w": tensor("E, K, N"), "offsets": OFFSETS, "r": tensor("T, N"), "gate": GATE},
            {"y": tensor("T, N"), "s": tensor("T", "fp32")},
        ),
        "t = gemm(x, w, offsets) + r",
        "return {'y': t * per_row(gate), 's': row_sums(t * t)}",
    ),
    "threads": trace(
        signature(
            {"x": X, "w": tensor("E, 2*N, K"), "offsets": OFFSETS, "u": tensor("T, N", "fp32")},
            {"h": tensor("T, N", "fp32")},
        ),
        "even, odd = pairs(gemm(x, w.mT, offsets))",
        "return {'h': even * odd + u}",
    ),
    "selects": trace(
        signature(
            {"x": X, "w": tensor("E, N, K"), "offsets": OFFSETS, "i": tensor("T", "int32")},
            {"lse": tensor("T", "fp32"), "z": tensor("T", "fp32")},
        ),
        "t = gemm(x, w.mT, offsets)",
        "return {'lse': row_logsumexp(t), 'z': row_select(t, i)}",
    ),
    "gathered": trace(
        signature(
            {
                "x": tensor("S, K"),
                "w": tensor("E, 2*F, K"),
                "offsets": OFFSETS,
                "index": tensor("T", "int32"),
            },
            {"pre": tensor("T, 2*F"), "act": tensor("T, F")},
        ),
        "t = gemm(x, w.mT, offsets, index)",
        "even, odd = pairs(t)",
        "return {'pre': t, 'act': silu(even) * odd}",
    ),
    "own": trace(
        signature({"d": tensor("T, N"), "x": X, "offsets": OFFSETS}, {"dw": tensor("E, N, K", "fp32")}),
        "return {'dw': gemm(d.mT, x, offsets)}",
    ),
}
COUNTS = {
    "balanced": [129, 129, 129, 130],
    "empty ends": [0, 0, 512, 5, 0],
    "empty between": [3, 0, 507, 0, 7],
    "one row each": [1, 1, 514, 1],
    "all to one": [0, 0, 0, 517, 0, 0],
    "one expert": [517],
    "tile edges": [128, 129, 127, 133],
    "more experts than lanes": [1 if i % 3 else 0 for i in range(69)] + [471],
}
LIES = {
    "backwards": [0, 258, 129, 517],
    "past the end": [0, 2585, 3619, 4653],
    "negative": [-7, -517, 258, 517],
    "short": [0, 10, 20, 258],
    "far": [0, -(2**31), 2**31 - 1, 5],
}


def bounded(offsets: list[int]) -> list[int]:
    inner = [min(max(end, 0), ROWS) for end in offsets[1:-1]]
    return [0, *itertools.accumulate(inner, max), ROWS]


def truthful(inputs: Tensors, offsets: list[int]) -> Tensors:
    """Clamp the offsets and the index to their bounds, as a kernel does; return all inputs."""
    right = {"offsets": torch.tensor(bounded(offsets), dtype=torch.int32, device="cuda")}
    right |= {name: t.clamp(0, len(inputs["x"]) - 1) for name, t in inputs.items() if name == "index"}
    return inputs | right


def drawn(program: Program, offsets: list[int]) -> tuple[Tensors, dict[str, int]]:
    sizes = {d: (SIZES | {"E": len(offsets) - 1})[d] for d in program.signature.dims}
    random = torch.Generator("cuda").manual_seed(1)
    inputs = {}
    for name, declared in program.signature.inputs.items():
        shape = [d(sizes) for d in declared.shape]
        values = torch.randn(shape, generator=random, device="cuda")
        values = values * SIZES["K"] ** -0.5 if len(shape) == 3 else values
        inputs[name] = values.bfloat16() if declared.dtype == "bf16" else values
    if "i" in inputs:
        inputs["i"] = torch.randint(
            -1, SIZES["N"] + 2, (ROWS,), generator=random, device="cuda", dtype=torch.int32
        )
    if "index" in inputs:  # some indices are out of bounds
        inputs["index"] = torch.randint(
            -9, SIZES["S"] + 9, (ROWS,), generator=random, device="cuda", dtype=torch.int32
        )
        inputs["index"][::100] = torch.tensor([-(2**31), 2**31 - 1] * 3, device="cuda")
    return inputs | {"offsets": torch.tensor(offsets, dtype=torch.int32, device="cuda")}, sizes


def run(
    program: Program, schedule: Schedule, sizes: dict[str, int], inputs: Tensors
) -> tuple[Tensors, Tensors]:
    """Run the program. Return the outputs, and the buffers in which guard rows surround the outputs."""
    plan = Plan(KernelSource(program, {0: schedule}), sizes)
    whole = {
        name: torch.full((2 * GUARD + len(t), *t.shape[1:]), -7.0, dtype=t.dtype, device="cuda")
        for name, t in plan.outputs().items()
    }
    outputs = {name: t[GUARD:-GUARD].fill_(torch.nan) for name, t in whole.items()}
    plan.run(inputs, outputs)
    return outputs, whole


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_their_experts_and_nothing_else_is_written(name: str, schedule: Schedule) -> None:
    program = PROGRAMS[name]
    if KernelSource(program, {}).lowered.gemms[0].index is not None:
        schedule = schedule._replace(cluster_m=2, cluster_n=1)
    every = {case: [0, *itertools.accumulate(counts)] for case, counts in COUNTS.items()} | LIES
    for case, offsets in every.items():
        inputs, sizes = drawn(program, offsets)
        expected = interpret(program, truthful(inputs, offsets))
        got, whole = run(program, schedule, sizes, inputs)
        for output, value in expected.items():
            scale = float(value.double().abs().max())
            assert float((got[output].double() - value.double()).abs().max()) < 0.02 * scale, (case, output)
            edges = torch.cat([whole[output][:GUARD].flatten(), whole[output][-GUARD:].flatten()])
            assert bool((edges == -7.0).all()), (case, output)


def test_a_call_refuses_lies_at_first_and_bears_them_later() -> None:
    program, random = PROGRAMS["pairs"], Random(0)
    kernel = Kernel(KernelSource(program, {0: SCHEDULES[0]}))
    inputs, _ = drawn(program, [0, 100, 200, ROWS])
    with pytest.raises(LaunchError, match="must rise from 0 to 517"):
        kernel(**inputs | {"offsets": torch.tensor([0, 200, 100, ROWS], dtype=torch.int32, device="cuda")})
    kernel(**inputs)
    for _ in range(20):
        ends = [random.randint(-(2**31), 2**31 - 1) for _ in range(4)]
        lies = torch.tensor(ends, dtype=torch.int32, device="cuda")
        got = kernel(**inputs | {"offsets": lies})
        truth = interpret(program, truthful(inputs, ends))
        torch.testing.assert_close(got["act"], truth["act"], rtol=2e-2, atol=2e-2)


def test_a_gathered_row_is_refused_outside_x_at_first_and_clamped_later() -> None:
    program = PROGRAMS["gathered"]
    kernel = Kernel(KernelSource(program, {0: SCHEDULES[0]}))
    lying, _ = drawn(program, [0, 100, 200, ROWS])
    with pytest.raises(LaunchError, match="'index': .* must be from 0 to 299"):
        kernel(**lying)
    right = truthful(lying, [0, 100, 200, ROWS])
    expected = kernel(**right)
    for output, value in kernel(**lying).items():
        assert torch.equal(value, expected[output])


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=str)
def test_a_row_of_nan_reaches_only_those_that_gather_it(schedule: Schedule) -> None:
    """K is 264, which is not a multiple of the 64 columns of an operand's tile. So the copy that gathers rows
    must fill the rest of each row's last tile with zeros."""
    inputs, sizes = drawn(PROGRAMS["gathered"], [0, 100, 200, ROWS])
    inputs = truthful(inputs, [0, 100, 200, ROWS])
    inputs["x"][7] = torch.nan
    inputs["index"][::3] = 7
    got, _ = run(PROGRAMS["gathered"], schedule, sizes, inputs)
    for value in got.values():
        assert torch.equal(value.isnan().any(1), inputs["index"] == 7)
