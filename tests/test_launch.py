"""Plans without a GPU: which tensor each launch is given. The kernels are stand-ins that record it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels
import pytest
import torch

from primitives import launch
from primitives.interpret import torch_dtype
from primitives.ir import Program, Schedule
from primitives.launch import Kernel, LaunchError, Plan, alignment_errors

SIZES = {"M": 100, "K": 64, "N": 200, "D": 64, "F": 104, "P": 72}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    recorded: list[tuple[str, tuple[Any, ...]]] = []

    def stand_in(lowered: Any, kernel: Any, *rest: Any) -> Callable[..., None]:
        return lambda *arguments: recorded.append((kernel.name, arguments))

    monkeypatch.setattr(launch, "compile_gemm", stand_in)
    monkeypatch.setattr(launch, "compile_vector", stand_in)
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 132 // size)
    return recorded


def planned(program: Program, schedule: Schedule | None = None) -> tuple[Plan, Any, Any]:
    steps = sum(n.op == "gemm" for n in program.nodes)
    sizes = {d: SIZES[d] for d in program.signature.dims}
    plan = Plan(program, sizes, dict.fromkeys(range(steps), schedule or Schedule()), "cpu")
    inputs = {
        name: torch.zeros([d(sizes) for d in t.shape], dtype=torch_dtype(t.dtype))
        for name, t in program.signature.inputs.items()
    }
    return plan, inputs, plan.outputs()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def test_outputs_have_the_specs_shapes_and_dtypes(calls):
    plan, _, outputs = planned(kernels.NORM.program)
    assert {n: (tuple(t.shape), t.dtype) for n, t in outputs.items()} == {
        "h": ((100, 200), torch.bfloat16),
        "hg": ((100, 200), torch.bfloat16),
        "rstd": ((100,), torch.float32),
    }


def test_one_step_and_its_finish(calls):
    program = kernels.NORM.program
    plan, inputs, outputs = planned(program, Schedule(128, 160))
    plan.run(inputs, outputs)
    (_, gemm), (_, finish) = calls
    a, b, d, c, epilogue, *_ = gemm
    names = {argument.name: argument for argument in plan.lowered.gemms[0].arguments}
    assert a is inputs["y"] and b is inputs["w"] and c is inputs["x"]
    stored = {plan.lowered.gemms[0].d.node: d} | {
        argument.node: getattr(epilogue, name) for name, argument in names.items() if argument.role == "store"
    }
    assert all(stored[program.outputs[name]] is outputs[name] for name in ("h", "hg"))
    (partial,) = (getattr(epilogue, n) for n, argument in names.items() if argument.role == "partial")
    assert partial.shape == (1, 100, 2) and partial.dtype == torch.float32  # 200 columns in tiles of 160
    (column,) = (getattr(epilogue, n) for n, argument in names.items() if argument.role == "column")
    assert column is inputs["gamma"]
    given = dict(zip([argument.role for argument in plan.lowered.vectors[0].arguments], finish, strict=True))
    assert given["partial"] is partial and given["out"] is outputs["rstd"]
    assert float(given["scalar"].value) == 200.0


def test_double_width_tiles_cross_as_32_bit_lanes(calls):
    plan, inputs, outputs = planned(kernels.BACKWARD.program)
    plan.run(inputs, outputs)
    _, (_, _, d, c, epilogue, *_) = calls[0]
    for packed, whole in ((c, inputs["z"]), (d, outputs["dz"])):
        assert packed.dtype == torch.float32 and packed.shape == (100, 104) and same(packed, whole)
    assert any(value is outputs["act"] for value in epilogue)


def test_a_chain_hands_on_what_it_stored(calls):
    program = kernels.CHAIN.program
    plan, inputs, outputs = planned(program)
    plan.run(inputs, outputs)
    gemms = {kernel.name: kernel for kernel in plan.lowered.gemms}
    first, second = (arguments for name, arguments in calls if name in gemms)
    assert second[0].dtype == torch.bfloat16
    written = [first[2], *(value for value in first[4] if isinstance(value, torch.Tensor))]
    assert any(same(second[0], tensor) for tensor in written)
    (finish,) = (arguments for name, arguments in calls if name not in gemms)
    rows = [getattr(second[4], a.name) for a in plan.lowered.gemms[1].arguments if a.role == "row"]
    assert rows and all(any(row is value for value in finish) for row in rows)
    assert [name in gemms for name, _ in calls] == [True, False, True]


def test_everything_between_kernels_lies_in_one_workspace_without_overlap(calls):
    plan, inputs, outputs = planned(kernels.CHAIN.program)
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize)
        for t in plan._slots.fixed
        if isinstance(t, torch.Tensor)
    )
    assert len(spans) >= 2
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    storages = {t.untyped_storage().data_ptr() for t in plan._slots.fixed if isinstance(t, torch.Tensor)}
    assert len(storages) == 1
    assert all(start % 256 == spans[0][0] % 256 for start, _ in spans)


def test_a_second_call_takes_its_own_tensors(calls):
    plan, inputs, outputs = planned(kernels.BACKWARD.program)
    plan.run(inputs, outputs)
    others = {name: t.clone() for name, t in inputs.items()}, {n: t.clone() for n, t in outputs.items()}
    plan.run(*others)
    again = calls[2][1]
    assert again[0] is others[0]["dy"] and same(again[3], others[0]["z"]) and same(again[2], others[1]["dz"])


def test_tensors_off_the_gpu_are_refused_before_anything_runs(calls):
    program = kernels.SWIGLU.program
    _, inputs, _ = planned(program)
    with pytest.raises(LaunchError, match="one CUDA device; they are on cpu"):
        Kernel(program, {0: Schedule()})(**inputs)
    assert not calls


def test_tiles_between_steps_must_be_aligned_too():
    shape = kernels.tensor
    signature = kernels.signature(
        {"x": shape("M, K"), "w": shape("2*F, K"), "v": shape("F, N")}, {"o": shape("M, N")}
    )
    program = kernels.trace(signature, "g, u = pairs(gemm(x, w.mT))", "return {'o': gemm(silu(g) * u, v)}")
    assert alignment_errors(program, {"M": 8, "K": 64, "F": 16, "N": 64}) == []
    (error,) = alignment_errors(program, {"M": 8, "K": 64, "F": 12, "N": 64})
    assert "rows of 12 bf16" in error


def test_a_workspace_that_is_large_enough_is_used_again(calls):
    program = kernels.CHAIN.program
    sizes = {d: SIZES[d] for d in program.signature.dims}
    narrow = Plan(program, sizes, {0: Schedule(128, 128), 1: Schedule(128, 128)}, "cpu")
    wide = Plan(program, sizes, {0: Schedule(128, 256, False), 1: Schedule()}, "cpu", narrow.workspace)
    assert wide.workspace is narrow.workspace
    small = torch.empty(1, dtype=torch.uint8)
    assert Plan(program, sizes, {0: Schedule(), 1: Schedule()}, "cpu", small).workspace is not small


def test_rows_that_are_no_multiple_of_16_bytes_are_named():
    program = kernels.SWIGLU.program
    assert alignment_errors(program, {"M": 3, "D": 520, "F": 520}) == []
    (error,) = alignment_errors(program, {"M": 8, "D": 520, "F": 516})
    assert error.startswith("act: rows of 516 bf16")
