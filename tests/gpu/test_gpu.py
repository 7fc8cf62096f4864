"""Tests on an H100 (``make test-gpu``): lowered kernels against fp64, launches, CUDA graphs, refused inputs.

These tests check what must hold in any run. They measure no times; the reports contain measured times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkout import ROOT

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.compiler.probe_schedules import PROBES, probes
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import LaunchError, alignment_errors
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import error_gate, reference
from coda_agent.verifier.numerics.inputs import draw
from coda_agent.verifier.sandbox.jail import Traced, trace
from coda_agent.verifier.spec.model import Spec

EXAMPLES = sorted((ROOT / "agent" / "prompts" / "examples").glob("*.yaml"))
BIAS_GELU = ROOT / "generated_kernels" / "gemm_bias_gelu.program.json"
ACCEPTED = sorted((ROOT / "generated_kernels").glob("*.program.json"))
SCHEDULES = [*PROBES, Schedule(128, 192, True, 1, 2, 16, True, True), Schedule(192, 128, True, 2, 1, 4)]


def example(path: Path) -> tuple[Spec, Program]:
    spec = load(path)
    traced = trace(path.with_suffix(".py").read_text(), spec.signature())
    assert isinstance(traced, Traced), traced
    return spec, traced.program


def accepted(path: Path) -> tuple[Spec, Program]:
    name = path.name.partition(".")[0]
    return load(ROOT / "specs" / f"{name}.yaml"), Program.from_json(path.read_text())


KERNELS = [pytest.param(example, p, id=p.stem) for p in EXAMPLES] + [
    pytest.param(accepted, p, id=p.name.partition(".")[0]) for p in ACCEPTED
]


def agrees(spec: Spec, kernel: Kernel, sizes: Mapping[str, int], seed: int) -> None:
    """Compare a kernel's outputs on random inputs with the fp64 reference."""
    inputs = draw(spec, sizes, seed=seed, device="cuda")
    given = {name: t.clone() for name, t in inputs.items()}  # a kernel that updates an input overwrites it
    got = kernel(**given, **{dim: sizes[dim] for dim in kernel.program.signature.named})
    torch.cuda.synchronize()
    truth, yard = reference.oracle(spec, inputs, sizes), reference.yardstick(spec, inputs, sizes)
    errors = error_gate.compare(spec, got, truth, yard)
    assert all(e.passed for e in errors), [e.reason for e in errors]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.tile_m}x{s.tile_n}")
@pytest.mark.parametrize("read, path", KERNELS)
def test_agrees_with_fp64_at_ragged_sizes(read, path, schedule):
    """A step that ``schedule`` does not suit runs on another schedule."""
    spec, program = read(path)
    ragged = min((case.sizes for case in spec.cases), key=lambda sizes: math.prod(sizes.values()))
    odd = ragged | {"M": 521} if "M" in ragged else ragged  # most kernels' rows need no alignment
    for seed, sizes in enumerate((ragged, odd)):
        if not alignment_errors(program, sizes):
            gemms = lower(program).gemms
            schedules = {g.step: probes(program, g, sizes, [schedule])[0] for g in gemms}
            agrees(spec, Kernel(KernelSource(program, schedules)), sizes, seed)


@pytest.mark.parametrize(
    "pairs, schedule",
    [
        (64, Schedule(64, 64, True, 1, 2)),
        (64, Schedule(128, 64, True, 2, 1)),
        (64, Schedule(128, 32, False, 1, 2)),
        (208, Schedule(128, 208, True, 1, 2)),
    ],
    ids=lambda each: f"{each.tile_m}x{each.tile_n}" if isinstance(each, Schedule) else f"{2 * each} columns",
)
def test_a_head_that_reads_a_table_may_be_several_tiles_wide(pairs, schedule):
    spec, program = accepted(ROOT / "generated_kernels" / "gemm_rope.program.json")
    kernel = Kernel(KernelSource(program, {0: schedule}))
    agrees(spec, kernel, {"M": 521, "K": 520, "H": 3, "P": pairs}, pairs)


def test_one_row_and_many_rows_of_the_same_kernel():
    spec, program = accepted(BIAS_GELU)
    kernel = Kernel(KernelSource(program, {0: Schedule()}))
    for rows in (1, 7, 129):
        agrees(spec, kernel, {"M": rows, "D": 264, "F": 392}, rows)


def test_replays_in_a_cuda_graph():
    spec, program = example(ROOT / "agent" / "prompts" / "examples" / "gemm_l1norm_gemm.yaml")
    sizes = {d: 512 for d in spec.dims}
    inputs = draw(spec, sizes, seed=1, device="cuda")
    plan = Kernel(KernelSource(program, {0: Schedule(), 1: Schedule()})).plan(inputs)
    outputs = plan.outputs()
    plan.run(inputs, outputs)
    expected = {name: t.clone() for name, t in outputs.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(inputs, outputs)
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(outputs[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t | {"x": t["x"].cpu()}, "one CUDA device"),
        (lambda t: t | {"x": t["x"].float()}, "'x' is torch.float32"),
        (lambda t: t | {"x": t["x"][:, ::2]}, "contiguous"),
        (lambda t: t | {"x": t["x"][:, :200].contiguous()}, "264"),
        (lambda t: {k: v for k, v in t.items() if k != "bias"}, "inputs must be bias, w, x; got x, w"),
        (lambda t: t | {"x": t["x"][0]}, "has 1 dims"),
        (
            lambda t: {
                "x": t["x"][:, :260].contiguous(),
                "w": t["w"][:, :260].contiguous(),
                "bias": t["bias"],
            },
            "16 bytes",
        ),
        (lambda t: t | {"x": t["x"][:0]}, "positive"),
    ],
    ids=["cpu", "dtype", "strided", "shape", "missing", "rank", "alignment", "empty"],
)
def test_refuses_what_it_cannot_launch_on(change, words):
    spec, program = accepted(BIAS_GELU)
    inputs = draw(spec, {"M": 128, "D": 264, "F": 392}, seed=1, device="cuda")
    with pytest.raises(LaunchError, match=words):
        Kernel(KernelSource(program, {0: Schedule()}))(**change(inputs))
