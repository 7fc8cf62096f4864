"""Tests of the roofline. Its counts are compared with counts worked out by hand, with consequences of the
counting rules, and with the memory that launches really receive."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checkout import ROOT
from operators import BODIES, kernel, of_spec, tensor, two_steps, widths

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.roofline import roofline as roofline_on
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.lang.signature import Signature
from coda_agent.primitives.runtime.executable import Plan
from coda_agent.primitives.target import H100, Ceiling

roofline = partial(roofline_on, machine=H100)  # the figures below were worked out for an H100
TILE = 16384 * 2048 * 2  # bytes of a bf16 tile at 1B: 64 MiB


def test_residual_rmsnorm_at_1b() -> None:
    found = roofline(of_spec("gemm_residual_partial_rmsnorm"), {"M": 16384, "K": 2048, "N": 2048})
    gemm, finish = found.steps
    tile = TILE
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
    found = roofline(of_spec("gemm_rmsnorm_swiglu"), {"M": 16384, "D": 2048, "F": 5632})
    (gemm,) = found.steps
    assert gemm.flops == 2 * 16384 * 2048 * 11264 == 755_914_244_096
    assert gemm.reads == {"x": 67_108_864, "w": 46_137_344, "rstd": 65_536}
    assert gemm.writes == {"preact": 369_098_752, "act": 184_549_376}
    assert found.seconds == pytest.approx(764.013e-6, rel=1e-5)


def test_swiglu_backward_at_1b() -> None:
    found = roofline(of_spec("gemm_swiglu_bwd"), {"M": 16384, "D": 2048, "F": 5632})
    gemm, finish = found.steps
    assert gemm.flops == 377_957_122_048
    assert gemm.reads == {"dy": 67_108_864, "w_down": 23_068_672, "z": 369_098_752}  # 0.46 GB
    assert gemm.writes == {"dz": 369_098_752, "act": 184_549_376, "partials0": 16384 * 22 * 4}
    assert finish.writes == {"s": 65_536}
    assert gemm.seconds == pytest.approx(382.006e-6, rel=1e-5)
    assert gemm.memory_seconds == pytest.approx(302.796e-6, rel=1e-5)


def test_cross_entropy_at_1b() -> None:
    found = roofline(of_spec("gemm_partial_cross_entropy"), {"M": 16384, "D": 2048, "V": 32768})
    gemm, finish = found.steps
    assert gemm.flops == found.flops == 2 * 16384 * 2048 * 32768 == 1 << 41
    target, vector = 16384 * 8, 16384 * 4  # int64, fp32
    assert gemm.reads == {"x": TILE, "w": 32768 * 2048 * 2, "target": target}
    partials = 16384 * 128 * 4  # 8 MiB: one log-sum-exp per row and 256 columns
    assert gemm.writes == {"logits": 1 << 30, "partials0": partials, "selected0": vector}
    assert finish.reads == {"partials0": partials, "selected0": vector, "target": target}
    assert finish.writes == {"lse": vector, "target_logit": vector, "selected0": vector}
    assert found.bytes == 1_283_653_632 + 8_585_216 + 3 * 65_536 == 1_292_435_456
    assert gemm.seconds == pytest.approx(2222.582e-6, rel=1e-6)  # 2199.02 GFLOP at 989.4 TFLOP/s
    assert gemm.memory_seconds == pytest.approx(383.180e-6, rel=1e-5)


def test_a_heads_values_are_read_once_and_its_statistics_stored() -> None:
    (norm,) = roofline(of_spec("gemm_qk_norm_rope"), {"M": 16384, "K": 4096, "H": 32, "P": 64}).steps
    assert norm.reads == {
        "x": 16384 * 4096 * 2, "w": 4096 * 4096 * 2, "gamma": 128 * 2, "positions": 65_536, "inv_freq": 256,
    }  # fmt: skip
    assert norm.writes == {"q": 16384 * 4096 * 2, "rstd": 16384 * 32 * 4}
    assert norm.flops == 2 * 16384 * 4096 * 4096
    (rope,) = roofline(of_spec("gemm_rope"), {"M": 16384, "K": 4096, "H": 96, "P": 64}).steps
    assert rope.reads == {"x": 1 << 27, "w": 12288 * 4096 * 2, "cos_sin": 16384 * 128 * 2}
    assert rope.writes == {"q": 16384 * 12288 * 2}


def test_sums_of_columns_at_1b() -> None:
    program, sizes = of_spec("gemm_residual_rmsnorm_bwd"), {"M": 16384, "K": 2048, "N": 2048}
    gemm, finish = roofline(program, sizes).steps
    vectors = {"gamma": 4_096, "rstd": 65_536, "s": 65_536}
    assert gemm.reads == {"dz": TILE, "w": 8_388_608, "h": TILE, "dres": TILE, **vectors}
    assert gemm.writes == {"dx": TILE, "hn": TILE, "partials0": 64 * 2048 * 4}  # 64 tiles of 256 rows
    assert (finish.reads, finish.writes) == ({"partials0": 524_288}, {"dgamma": 8_192})
    ragged = {"M": 1000, "K": 520, "N": 776}
    pinned = roofline(program._replace(schedule={0: Schedule(192, 128)}), ragged)
    assert pinned.steps[0].writes["partials0"] == 6 * 776 * 4  # ceil(1000 / 192)
    assert roofline(program, ragged).steps[0].writes["partials0"] == 4 * 776 * 4


def test_partials_have_the_gemms_columns_whatever_the_tiles() -> None:
    gemm, *finishes = roofline(widths(), {"M": 512, "K": 64, "F": 384}).steps
    column, row = 2 * 768 * 4, 512 * 3 * 4  # two tiles of 256 rows; three tiles of 256 GEMM columns
    written = dict(gemm.writes)
    assert [written.pop("h"), written.pop("d")] == [512 * 384 * 4, 512 * 1536 * 2]
    # A reduction over 4*F columns has two partials: one for even and one for odd columns. A reduction over F
    # columns also has a partial for each of the GEMM's 2*F columns.
    assert sorted(written.values()) == sorted([2 * column, column, row, row, row])
    assert {tuple(sorted(f.writes)) for f in finishes} == {("sums",), ("largest",), ("lse", "peak", "top")}
    assert [f.reads["alpha"] for f in finishes if "alpha" in f.reads] == [4]
    sums = next(f for f in finishes if "sums" in f.writes)
    assert (list(sums.reads.values()), sums.writes) == ([2 * column], {"sums": 1536 * 4})


def test_an_updated_buffer_is_read_and_written() -> None:
    found = roofline(of_spec("gemm_grad_accumulate"), {"M": 16, "N": 4096, "K": 4096})
    (step,) = found.steps
    assert step.flops == 2 * 16 * 4096 * 4096
    assert step.reads == {"dy": 131_072, "x": 131_072, "dw": 67_108_864}
    assert step.writes == {"dw_new": 67_108_864}
    # The least time counts dw in both directions: dw is read from memory, and dw_new is written back.
    assert found.limit == (2 * 131_072 + 2 * 67_108_864 - 50 * 2**20) / 3.35e12


def test_numbers_and_indices_in_memory() -> None:
    (alpha,) = roofline(of_spec("gemm_alpha_residual"), {"M": 16384, "K": 2048, "N": 2048}).steps
    assert alpha.reads == {"y": TILE, "w": 8_388_608, "x": TILE, "alpha": 4}
    (bwd,) = roofline(of_spec("gemm_cross_entropy_bwd"), {"M": 16384, "D": 2048, "V": 32768}).steps
    assert {n: bwd.reads[n] for n in ("target", "lse", "dloss")} == {
        "target": 131_072, "lse": 65_536, "dloss": 65_536,
    }  # fmt: skip
    assert bwd.writes == {"dlogits": 1 << 30}


def test_fp8_operands_take_a_byte_and_half_the_time() -> None:
    (step,) = roofline(of_spec("gemm_fp8_row_scale"), {"M": 16384, "K": 4096, "N": 4096}).steps
    assert step.flops == 1 << 39
    assert step.reads == {"x": 16384 * 4096, "w": 4096 * 4096, "sx": 65_536, "sw": 16_384}
    assert step.writes == {"y": 16384 * 4096 * 2}
    assert step.compute_seconds == pytest.approx(277.809e-6, rel=1e-5)  # 549.76 GFLOP at 1978.9 TFLOP/s


def test_each_step_has_the_peak_of_its_own_operands() -> None:
    inputs = {"x": tensor("fp8_e4m3", "M", "K"), "w": tensor("fp8_e4m3", "N", "K")}
    inputs |= {"u": tensor("fp16", "N", "P")}
    signature = Signature("mixed", ("M", "K", "N", "P"), inputs, {"o": tensor("fp32", "M", "P")})
    program = kernel(signature, '    return {"o": gemm(gemm(x, w.mT) * 0.5, u)}\n')
    first, second = roofline(program, {"M": 512, "K": 256, "N": 256, "P": 256}).steps
    assert first.flops == second.flops
    assert (first.compute_seconds, second.compute_seconds) == (
        first.flops / 1978.9e12, second.flops / 989.4e12,
    )  # fmt: skip
    assert first.writes == {"t0": 512 * 256 * 2}  # t0 is stored in the dtype of u, the other operand


def test_what_passes_between_steps_is_written_once_and_read_once() -> None:
    found = roofline(two_steps(), {"M": 512, "K": 128, "N": 256, "P": 64})
    first, finish, second = found.steps
    assert [(s.kind, s.step) for s in found.steps] == [("gemm", 0), ("vector", 0), ("gemm", 1)]
    assert first.writes == {"t0": 512 * 256 * 2, "partials0": 512 * 1 * 4}  # t0 is hg; h is not written
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
    program = kernel(signature, '    return {"o": gemm(x, x.mT) + x}\n')
    (step,) = roofline(program, {"M": 1024}).steps
    assert step.reads == {"x": 1024 * 1024 * 2}
    assert step.writes == {"o": 1024 * 1024 * 4}


def test_limit_grants_the_l2_what_it_can_hold() -> None:
    program, l2 = of_spec("gemm_rmsnorm_swiglu"), 50 * 2**20
    thin = roofline(program, {"M": 16384, "D": 64, "F": 5632})
    (step,) = thin.steps
    # All bytes that the step reads count. Up to 50 MiB of the bytes that the step writes do not count,
    # because these bytes may still be in the L2 when the timing ends.
    assert thin.limit == (step.bytes - l2) / 3.35e12
    small = roofline(program, {"M": 256, "D": 64, "F": 256})
    assert sum(small.steps[0].writes.values()) < l2
    assert small.limit == sum(small.steps[0].reads.values()) / 3.35e12 < small.seconds
    # Values between steps and this small output may stay in the L2. So only the inputs count, once each.
    chain = roofline(two_steps(), {"M": 8192, "K": 64, "N": 512, "P": 64})
    inputs = 2 * (8192 * 64 + 64 * 512 + 8192 * 512 + 512 + 512 * 64)
    assert chain.limit == inputs / 3.35e12
    big = roofline(program, {"M": 16384, "D": 2048, "F": 5632})
    assert big.limit == big.steps[0].compute_seconds


def test_thin_matmuls_are_bound_by_memory() -> None:
    found = roofline(of_spec("gemm_rmsnorm_swiglu"), {"M": 16384, "D": 64, "F": 5632})
    assert found.binds == found.steps[0].binds == "memory"
    assert found.seconds == found.steps[0].bytes / 3.35e12


def test_machine_numbers_and_their_sources() -> None:
    assert (H100.tensor.value, H100.memory.value, H100.multiprocessors.value) == (989.4e12, 3.35e12, 132)
    assert H100.tensor_fp8.value == 1978.9e12
    assert all(c.source for c in (H100.tensor, H100.tensor_fp8, H100.memory, H100.multiprocessors))
    half = H100._replace(tensor=Ceiling(H100.tensor.value / 2, "FLOP/s", "made up"))
    sizes = {"M": 16384, "D": 2048, "F": 5632}
    program = of_spec("gemm_rmsnorm_swiglu")
    assert roofline(program, sizes, machine=half).seconds == 2 * roofline(program, sizes).seconds


def test_sizes_must_be_complete_and_positive() -> None:
    with pytest.raises(ValueError, match="F is missing.*M, D, F"):
        roofline(of_spec("gemm_rmsnorm_swiglu"), {"M": 1, "D": 1})
    with pytest.raises(ValueError, match="M is 0"):
        roofline(of_spec("gemm_rmsnorm_swiglu"), {"M": 0, "D": 1, "F": 1})


def test_dict_survives_json_with_totals() -> None:
    found = roofline(two_steps(), {"M": 512, "K": 128, "N": 256, "P": 64})
    data = json.loads(json.dumps(found.to_dict()))
    assert data["flops"] == sum(s["flops"] for s in data["steps"]) == found.flops
    assert data["bytes"] == sum(sum(s[way].values()) for s in data["steps"] for way in ("reads", "writes"))
    assert data["machine"]["memory"] == {"value": 3.35e12, "unit": "B/s", "source": H100.memory.source}


# Sizes of all dims. 1000 is not a multiple of a tile's rows, and no width is a multiple of a tile's columns.
RAGGED = {"M": 1000, "K": 520, "N": 776, "D": 520, "F": 264, "V": 776, "H": 13, "P": 32}
PROGRAMS = {**{name: of_spec(name) for name in BODIES}, "two": two_steps(), "widths": widths()}


def given_bytes(arguments: tuple[Any, ...]) -> int:
    """Count the bytes of memory that a launch receives. A tensor and its views count once, and the address of
    a number counts as 4 bytes."""
    flat = [x for a in arguments for x in (a if isinstance(a, tuple) else (a,))]
    tensors = {x.data_ptr(): x.nbytes for x in flat if isinstance(x, torch.Tensor)}
    return sum((tensors | {x: 4 for x in flat if isinstance(x, int) and x > 1 << 16}).values())


@pytest.mark.parametrize("schedule", [Schedule(128, 128), Schedule(256, 192, False)], ids=["128", "192"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_counts_the_bytes_that_launches_are_given(
    name: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans allocate and bind memory as the lowered text states. The roofline must count every buffer that a
    launch receives."""
    launched: list[int] = []

    def stand_in(*_: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append(given_bytes(arguments))

    monkeypatch.setattr("coda_agent.primitives.runtime.executable.compile_gemm", stand_in)
    monkeypatch.setattr("coda_agent.primitives.runtime.executable.compile_vector", stand_in)
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 132 // size)
    program = PROGRAMS[name]
    program = program._replace(schedule=dict.fromkeys(range(2 if name == "two" else 1), schedule))
    sizes = {d: RAGGED[d] for d in program.signature.dims}
    plan = Plan(KernelSource(program, program.schedule), sizes, "cpu")
    inputs = {
        n: torch.empty([d(sizes) for d in t.shape], dtype=torch_dtype(t.dtype))
        for n, t in program.signature.inputs.items()
    }
    plan.run(inputs, plan.outputs())
    # A launch receives two kinds of buffers once, but reads and also writes them. One kernel reads and
    # empties a selection's buffer. A store adds to an output that holds the values of the updated input.
    twice = set(program.signature.updates.values())
    assert launched == [
        sum(size for tensor, size in (s.reads | s.writes).items() if tensor not in twice)
        for s in roofline(program, sizes).steps
    ]


def test_needs_the_standard_library_only() -> None:
    code = "import sys, coda_agent.primitives.compiler.roofline; "
    code += "print(*{'torch', 'cutlass', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
