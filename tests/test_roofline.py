"""Roofline: counts worked out by hand for the three operators, and what the counting rules imply."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import primitives  # noqa: F401  # trace_source looks the vocabulary up
from primitives.cut import cut
from primitives.dims import Dim
from primitives.ir import Program, Schedule, Signature, TensorType
from primitives.lower import lower
from primitives.roofline import H100, Ceiling, roofline, vector_steps
from primitives.trace import trace_source
from verifier.spec import load

ROOT = Path(__file__).parents[1]
KERNELS = {
    "gemm_residual_partial_rmsnorm": """
from primitives import gemm, kernel, per_column, row_sums, rsqrt
@kernel
def k(y, w, x, gamma, eps):
    h = gemm(y, w.mT) + x
    return {"h": h, "hg": h * per_column(gamma), "rstd": rsqrt(row_sums(h * h) / h.columns + eps)}
""",
    "gemm_rmsnorm_swiglu": """
from primitives import gemm, kernel, pairs, per_row, silu
@kernel
def k(x, w, rstd):
    z = gemm(x, w.mT) * per_row(rstd)
    gate, up = pairs(z)
    return {"preact": z, "act": silu(gate) * up}
""",
    "gemm_swiglu_bwd": """
from primitives import gemm, join, kernel, pairs, row_sums, sigmoid
@kernel
def k(dy, w_down, z):
    d = gemm(dy, w_down)
    gate, up = pairs(z)
    s = sigmoid(gate)
    dgate, dup = d * up * (s + gate * s * (1 - s)), d * gate * s
    return {"dz": join(dgate, dup), "act": gate * s * up, "s": row_sums(dgate * gate + dup * up)}
""",
}


def traced(name: str) -> Program:
    return trace_source(KERNELS[name], load(ROOT / "specs" / f"{name}.yaml", check=False).signature())


def tensor(dtype: str, *shape: str) -> TensorType:
    return TensorType(tuple(map(Dim.parse, shape)), dtype)


def two_steps(schedule: dict[int, Schedule] | None = None) -> Program:
    """Projection, residual, RMSNorm deferred past the next GEMM."""
    signature = Signature(
        "two", ("M", "K", "N", "P"),
        {"y": tensor("bf16", "M", "K"), "w": tensor("bf16", "K", "N"), "x": tensor("bf16", "M", "N"),
         "gamma": tensor("bf16", "N"), "u": tensor("bf16", "N", "P")},
        {"up": tensor("bf16", "M", "P")},
    )  # fmt: skip
    program = trace_source(
        """
from primitives import gemm, kernel, per_column, per_row, row_sums, rsqrt
@kernel
def k(y, w, x, gamma, u):
    h = gemm(y, w) + x
    return {"up": gemm(h * per_column(gamma), u) * per_row(rsqrt(row_sums(h * h) / h.columns + 1e-6))}
""",
        signature,
    )
    return program._replace(schedule=schedule or {})


def test_residual_rmsnorm_at_1b() -> None:
    found = roofline(traced("gemm_residual_partial_rmsnorm"), {"M": 16384, "K": 2048, "N": 2048})
    gemm, finish = found.steps
    tile = 16384 * 2048 * 2  # 64 MiB
    assert gemm.flops == found.flops == 137_438_953_472
    assert gemm.reads == {"y": tile, "w": 8_388_608, "x": tile, "gamma": 4_096}
    assert gemm.writes == {"h": tile, "hg": tile, "partials0": 16384 * (2048 // 256) * 4}
    assert (finish.flops, finish.reads, finish.writes) == (0, {"partials0": 524_288}, {"rstd": 65_536})
    assert found.bytes == 4 * tile + 8_388_608 + 4_096 + 2 * 524_288 + 65_536 == 277_942_272
    assert gemm.seconds == pytest.approx(138.911e-6, rel=1e-5)  # 137.44 GFLOP at 989.4 TFLOP/s
    assert gemm.memory_seconds == pytest.approx(82.792e-6, rel=1e-5)  # 277.35 MB at 3.35 TB/s
    assert (gemm.binds, finish.binds, found.binds) == ("compute", "memory", "compute")
    assert found.seconds == gemm.seconds + finish.seconds


def test_rmsnorm_swiglu_at_1b() -> None:
    found = roofline(traced("gemm_rmsnorm_swiglu"), {"M": 16384, "D": 2048, "F": 5632})
    (gemm,) = found.steps
    assert gemm.flops == 2 * 16384 * 2048 * 11264 == 755_914_244_096
    assert gemm.reads == {"x": 67_108_864, "w": 46_137_344, "rstd": 65_536}
    assert gemm.writes == {"preact": 369_098_752, "act": 184_549_376}
    assert found.seconds == pytest.approx(764.013e-6, rel=1e-5)


def test_swiglu_backward_at_1b() -> None:
    found = roofline(traced("gemm_swiglu_bwd"), {"M": 16384, "D": 2048, "F": 5632})
    gemm, finish = found.steps
    assert gemm.flops == 377_957_122_048
    assert gemm.reads == {"dy": 67_108_864, "w_down": 23_068_672, "z": 369_098_752}  # 0.46 GB
    assert gemm.writes == {"dz": 369_098_752, "act": 184_549_376, "partials0": 16384 * 22 * 4}
    assert finish.writes == {"s": 65_536}
    assert gemm.seconds == pytest.approx(382.006e-6, rel=1e-5)
    assert gemm.memory_seconds == pytest.approx(302.796e-6, rel=1e-5)


def test_what_passes_between_steps_is_written_once_and_read_once() -> None:
    found = roofline(two_steps(), {"M": 512, "K": 128, "N": 256, "P": 64})
    first, finish, second = found.steps
    assert [(s.kind, s.step) for s in found.steps] == [("gemm", 0), ("vector", 0), ("gemm", 1)]
    assert first.writes == {"t0": 512 * 256 * 2, "partials0": 512 * 1 * 4}  # hg; h itself never leaves
    assert (finish.reads, finish.writes) == ({"partials0": 2048}, {"v0": 2048})
    assert second.reads == {"t0": 262_144, "u": 256 * 64 * 2, "v0": 2048}
    assert second.flops == 2 * 512 * 256 * 64
    assert found.flops == first.flops + second.flops
    assert found.seconds == math.fsum(max(s.compute_seconds, s.memory_seconds) for s in found.steps)


def test_partials_follow_the_programs_own_tile() -> None:
    sizes = {"M": 512, "K": 128, "N": 1000, "P": 64}
    pinned = roofline(two_steps({0: Schedule(tile_n=128)}), sizes)
    assert pinned.steps[0].writes["partials0"] == 512 * 8 * 4  # ceil(1000 / 128)
    assert roofline(two_steps(), sizes).steps[0].writes["partials0"] == 512 * 4 * 4  # ceil(1000 / 256)


def test_a_tensor_with_two_uses_in_a_step_is_read_once() -> None:
    signature = Signature("square", ("M",), {"x": tensor("fp16", "M", "M")}, {"o": tensor("fp32", "M", "M")})
    program = trace_source(
        """
from primitives import gemm, kernel
@kernel
def k(x):
    return {"o": gemm(x, x.mT) + x}
""",
        signature,
    )
    (step,) = roofline(program, {"M": 1024}).steps
    assert step.reads == {"x": 1024 * 1024 * 2}
    assert step.writes == {"o": 1024 * 1024 * 4}


def test_limit_grants_the_l2_what_it_can_hold() -> None:
    program, l2 = traced("gemm_rmsnorm_swiglu"), 50 * 2**20
    thin = roofline(program, {"M": 16384, "D": 64, "F": 5632})
    (step,) = thin.steps
    # Every byte read, and of those written all but 50 MiB, which may be in the L2 when the clock stops.
    assert thin.limit == (step.bytes - l2) / 3.35e12
    small = roofline(program, {"M": 256, "D": 64, "F": 256})
    assert sum(small.steps[0].writes.values()) < l2
    assert small.limit == sum(small.steps[0].reads.values()) / 3.35e12 < small.seconds
    # Between steps nothing need leave the L2: inputs once, the output at most.
    chain = roofline(two_steps(), {"M": 8192, "K": 64, "N": 512, "P": 64})
    inputs = 2 * (8192 * 64 + 64 * 512 + 8192 * 512 + 512 + 512 * 64)
    assert chain.limit == inputs / 3.35e12
    big = roofline(program, {"M": 16384, "D": 2048, "F": 5632})
    assert big.limit == big.steps[0].compute_seconds


def test_thin_matmuls_are_bound_by_memory() -> None:
    found = roofline(traced("gemm_rmsnorm_swiglu"), {"M": 16384, "D": 64, "F": 5632})
    assert found.binds == found.steps[0].binds == "memory"
    assert found.seconds == found.steps[0].bytes / 3.35e12


def test_machine_numbers_and_their_sources() -> None:
    assert (H100.tensor.value, H100.memory.value, H100.multiprocessors.value) == (989.4e12, 3.35e12, 132)
    assert all(c.source for c in (H100.tensor, H100.memory, H100.multiprocessors))
    half = replace(H100, tensor=Ceiling(H100.tensor.value / 2, "FLOP/s", "made up"))
    sizes = {"M": 16384, "D": 2048, "F": 5632}
    program = traced("gemm_rmsnorm_swiglu")
    assert roofline(program, sizes, half).seconds == 2 * roofline(program, sizes).seconds


def test_sizes_must_be_complete_and_positive() -> None:
    with pytest.raises(ValueError, match="F is missing.*M, D, F"):
        roofline(traced("gemm_rmsnorm_swiglu"), {"M": 1, "D": 1})
    with pytest.raises(ValueError, match="M is 0"):
        roofline(traced("gemm_rmsnorm_swiglu"), {"M": 0, "D": 1, "F": 1})


def test_dict_survives_json_with_totals() -> None:
    found = roofline(two_steps(), {"M": 512, "K": 128, "N": 256, "P": 64})
    data = json.loads(json.dumps(found.to_dict()))
    assert data["flops"] == sum(s["flops"] for s in data["steps"]) == found.flops
    assert data["bytes"] == sum(sum(s[way].values()) for s in data["steps"] for way in ("reads", "writes"))
    assert data["machine"]["memory"] == {"value": 3.35e12, "unit": "B/s", "source": H100.memory.source}


@pytest.mark.parametrize("name", [*KERNELS, "two"])
def test_counts_what_the_lowered_kernels_take(name: str) -> None:
    """The lowering decides what kernels are called with; the roofline must count the same tensors."""
    program = two_steps() if name == "two" else traced(name)
    lowered, steps = lower(program), cut(program)
    for kernel, step in zip(lowered.gemms, steps.gemms, strict=True):
        arguments = [a for a in (*kernel.arguments, kernel.c, kernel.d) if a is not None]
        assert {a.node for a in arguments if a.role == "load"} == set(step.loads)
        assert {a.node for a in arguments if a.role == "store"} == set(step.stores)
        assert {a.node for a in arguments if a.role == "partial"} == set(step.reductions)
    counted = [(v.stage, set(v.partials), set(v.vectors), set(v.roots)) for v in vector_steps(program, steps)]
    taken = [
        (v.step, *({a.node for a in v.arguments if a.role == role} for role in ("partial", "vector", "out")))
        for v in lowered.vectors
    ]
    assert counted == taken


def test_needs_the_standard_library_only() -> None:
    code = "import sys, primitives.roofline; print(*{'torch', 'cutlass', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
