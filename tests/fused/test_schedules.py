"""Tests of choosing schedules for given sizes, and of reusing plans. A schedule comes from a report, from a
tuned table, or from the nearest sizes that have one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from operators import of_spec

from coda_agent.fused import launching, ops, schedules
from coda_agent.fused.programs import Typed
from coda_agent.primitives.compiler.lower import lower
from coda_agent.primitives.lang.interpret import torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launchable import LaunchError

H100 = "NVIDIA H100 80GB HBM3"
WIDE = {"M": 16384, "D": 4096, "F": 11008}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    schedules.known.cache_clear()
    yield
    schedules.known.cache_clear()


def rows(name: str) -> list[schedules.TunedStep]:
    return [row for row in schedules.known() if row.kernel == name]


def chosen(name: str, sizes: dict[str, int]) -> dict[int, Schedule]:
    return schedules.chosen(ops.defined[name].program, sizes, H100, schedules.known())


def test_the_sizes_of_a_report_have_its_schedules() -> None:
    for row in rows("gemm_swiglu_mlp"):
        m, n, k = row.shape
        sizes = {"M": m, "D": k, "F": n // 2} if row.step == 0 else {"M": m, "D": n, "F": k}
        assert chosen("gemm_swiglu_mlp", sizes)[row.step] == row.schedule


def test_other_sizes_have_the_nearest_ones() -> None:
    usual = chosen("gemm_rmsnorm_swiglu", WIDE)
    assert chosen("gemm_rmsnorm_swiglu", WIDE | {"M": 15000, "F": 11264}) == usual
    small = chosen("gemm_rmsnorm_swiglu", WIDE | {"M": 100})
    assert small == chosen("gemm_rmsnorm_swiglu", WIDE | {"M": 128}) != usual


def test_a_program_without_a_report_takes_those_of_others() -> None:
    program = ops.defined["gemm_swiglu"].program
    other = program._replace(signature=program.signature._replace(name="unknown"))
    (found,) = schedules.chosen(other, WIDE, H100, schedules.known()).values()
    near = [row.schedule for row in schedules.known() if row.shape == (16384, 22016, 4096)]
    assert found in near


def test_another_program_at_these_sizes_counts_as_two_doublings_away() -> None:
    program = ops.defined["gemm_rmsnorm_swiglu"].program
    own, other = Schedule(128, 192, False, 1, 2), Schedule(128, 128, False, 1, 2)
    there = schedules.TunedStep(H100, "gemm_swiglu", 0, (16384, 22016, 4096), other)
    for far, wanted in ((2048 * 3, own), (1024 * 7, own), (512, other)):
        row = schedules.TunedStep(H100, "gemm_rmsnorm_swiglu", 0, (far, 22016, 4096), own)
        assert schedules.chosen(program, WIDE, H100, [there, row]) == {0: wanted}


def test_rows_by_experts_serve_only_programs_with_experts() -> None:
    row = schedules.TunedStep(H100, "unknown", 0, (16384, 22016, 4096, 8), Schedule(128, 192, False, 1, 2))
    far = schedules.TunedStep(H100, "unknown", 0, (128, 512, 512), Schedule(128, 128, False, 1, 2))
    program, grouped = (ops.defined[f"gemm_{name}swiglu"].program for name in ("", "grouped_"))
    assert schedules.chosen(program, WIDE, H100, [row, far]) == {0: far.schedule}
    experts = {"T": 16384, "E": 8, "D": 4096, "F": 11008}
    assert schedules.chosen(grouped, experts, H100, [row, far]) == {0: row.schedule}


def test_a_product_of_each_expert_has_sizes_too() -> None:
    program = of_spec("gemm_grouped_weight_grad", "    return {'dw': gemm(dz.mT, x, offsets)}\n")
    sizes = {"T": 16384, "E": 8, "N": 22016, "K": 4096}
    assert schedules.products(program, sizes) == {0: (22016, 4096, 16384, 8)}


@pytest.mark.parametrize("pairs", [16, 32, 64])
def test_a_tile_holds_the_heads(pairs: int) -> None:
    sizes = {"M": 96, "K": 1024, "H": 7, "P": pairs}
    program = ops.defined["gemm_qk_norm_rope"].program
    (kernel,) = lower(program).gemms
    assert kernel.admits(chosen("gemm_qk_norm_rope", sizes)[0], sizes)


def test_heads_that_no_tile_holds_are_refused() -> None:
    with pytest.raises(LaunchError, match="no tile holds"):
        chosen("gemm_qk_norm_rope", {"M": 96, "K": 1024, "H": 7, "P": 3})


def test_a_tuned_table_comes_first() -> None:
    wanted = Schedule(128, 192, False, 1, 2)
    assert chosen("gemm_rmsnorm_swiglu", WIDE)[0] != wanted
    path = schedules.keep(
        "gemm_rmsnorm_swiglu",
        [schedules.TunedStep(H100, "gemm_rmsnorm_swiglu", 0, (16384, 22016, 4096), wanted)],
    )
    assert path.is_file()
    assert chosen("gemm_rmsnorm_swiglu", WIDE)[0] == wanted


def test_a_table_grows_and_the_last_row_of_a_step_and_sizes_counts() -> None:
    one, other = Schedule(128, 192, False, 1, 2), Schedule(128, 128, False, 1, 2)
    rows = [schedules.TunedStep(H100, "k", 0, (m, 64, 64), one) for m in (128, 256)]
    for found in (rows[:1], rows[1:], [rows[0]._replace(schedule=other)]):
        schedules.keep("k", found)
    assert [r for r in schedules.known() if r.kernel == "k"] == [rows[0]._replace(schedule=other), rows[1]]


def test_the_tables_of_the_package_come_before_the_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted, own = Schedule(128, 192, False, 1, 2), Schedule(128, 128, False, 1, 2)
    row = schedules.TunedStep(H100, "gemm_rmsnorm_swiglu", 0, (16384, 22016, 4096), wanted)
    schedules.keep(row.kernel, [row]).rename(tmp_path / "shipped.json")
    monkeypatch.setattr(schedules, "TUNED", tmp_path)
    assert chosen(row.kernel, WIDE)[0] == wanted
    schedules.keep(row.kernel, [row._replace(schedule=own)])
    assert chosen(row.kernel, WIDE)[0] == own


class Counted:
    """Stands in for a plan, because a plan needs a GPU."""

    made: list[dict[str, int]] = []

    def __init__(self, kernel: Any, sizes: dict[str, int], *more: Any):
        self.made.append(dict(sizes))
        self.signature, self.device = kernel.program.signature, torch.device("cpu")

    def call(self, *given: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs = dict(zip(self.signature.inputs, given, strict=True))
        for name in self.signature.updates.values():
            inputs[name].fill_(1)
        updates, first = self.signature.updates, next(iter(inputs))
        return {n: inputs[updates.get(n, first)] for n in self.signature.outputs}


def drawn(rows: int) -> dict[str, torch.Tensor]:
    x, w = torch.zeros(rows, 64).bfloat16(), torch.zeros(128, 64).bfloat16()
    return {"x": x, "w": w, "rstd": torch.ones(rows)}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    monkeypatch.setattr(Counted, "made", [])
    monkeypatch.setattr(launching, "Plan", Counted)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return Counted.made


def launcher(program: Program) -> launching.Launcher:
    return launching.Launcher(program, ("x", "w", "rstd"), ("preact", "act"))


def test_tensors_like_the_last_ones_are_launched_without_checks(counted: list[dict[str, int]]) -> None:
    program = ops.defined["gemm_rmsnorm_swiglu"].program
    launch, first = launcher(program), drawn(8)
    assert launch.again([*first.values()]) is None
    launch(Typed(program, False), first)
    assert launch.again([*drawn(8).values()]) is not None
    flat = torch.zeros(8 * 64 + 1).bfloat16()
    others = (drawn(16), drawn(8) | {"w": torch.zeros(128, 64)}, drawn(8) | {"x": flat[1:].view(8, 64)})
    for other in (*others, drawn(8) | {"x": torch.zeros(64, 8).bfloat16().mT}):
        assert launch.again([*other.values()]) is None
    with torch.enable_grad():
        wanting = drawn(8) | {"w": torch.zeros(128, 64).bfloat16().requires_grad_()}
        assert launch.again([*wanting.values()]) is None
    assert len(counted) == 1


def test_an_input_that_a_kernel_overwrites_is_left_as_it_is(counted: list[dict[str, int]]) -> None:
    program = ops.defined["gemm_grad_accumulate"].program
    names = tuple(program.signature.inputs)
    given = {n: torch.zeros(64, 64, dtype=torch_dtype(t.dtype)) for n, t in program.signature.inputs.items()}
    (made,) = launching.Launcher(program, names, ("dw_new",))(Typed(program, False), given)
    assert torch.all(made == 1) and torch.all(given["dw"] == 0)


def test_plans_are_bounded_and_the_last_used_are_kept(counted: list[dict[str, int]]) -> None:
    program, plans = ops.defined["gemm_rmsnorm_swiglu"].program, launching.Plans(most=3)
    for rows in (8, 16, 24, 8, 32, 8, 16):
        plans.get(program, drawn(rows), ("x", "w", "rstd"))
        assert len(plans._plans) <= 3
    assert [sizes["M"] for sizes in counted] == [8, 16, 24, 32, 16]


def test_schedules_are_chosen_again_on_demand(counted: list[dict[str, int]]) -> None:
    program = ops.defined["gemm_rmsnorm_swiglu"].program
    launch = launcher(program)
    launching.choose_again()
    for _ in range(2):
        launch(Typed(program, False), drawn(8))
    assert len(counted) == 1
    launching.choose_again()
    assert launch.again([*drawn(8).values()]) is None
    launch(Typed(program, False), drawn(8))
    assert len(counted) == 2


def test_threads_share_one_plan(counted: list[dict[str, int]]) -> None:
    program, plans, found = ops.defined["gemm_rmsnorm_swiglu"].program, launching.Plans(), list[Any]()

    def get() -> None:
        found.append(plans.get(program, drawn(8), ("x", "w", "rstd")))

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted) == 1 and len({id(plan) for plan in found}) == 1


def test_what_cannot_be_launched_says_so(counted: list[dict[str, int]]) -> None:
    program, plans = ops.defined["gemm_rmsnorm_swiglu"].program, launching.Plans()
    odd = {"x": torch.zeros(8, 6).bfloat16(), "w": torch.zeros(12, 6).bfloat16(), "rstd": torch.ones(8)}
    with pytest.raises(LaunchError, match="rows of 6 bf16 are not a multiple of 16 bytes"):
        plans.get(program, odd, ("x", "w", "rstd"))
    with pytest.raises(LaunchError, match="input 'x' has shape"):
        plans.get(program, drawn(8) | {"w": torch.zeros(128, 56).bfloat16()}, ("x", "w", "rstd"))
    with pytest.raises(LaunchError, match="matrices are fp32"):
        launcher(program)(Typed(program, True), drawn(8))


def test_a_gpu_that_is_no_hopper_is_refused(
    counted: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(LaunchError, match="is not a Hopper GPU"):
        launching.Plans().get(ops.defined["gemm_rmsnorm_swiglu"].program, drawn(8), ("x", "w", "rstd"))
    assert counted == []


def test_tensors_of_two_devices_are_not_launched(counted: list[dict[str, int]]) -> None:
    given = drawn(8) | {"w": torch.zeros(128, 64, device="meta").bfloat16()}
    with pytest.raises(ValueError, match="on cpu, meta; move them to one device"):
        ops.defined["gemm_rmsnorm_swiglu"].on_cuda(*given.values())
    assert counted == []


def test_misaligned_tensors_are_copied() -> None:
    flat = torch.arange(64 * 8 + 1).bfloat16()
    view = flat[1:].view(64, 8)
    copy = launching.launchable(view)
    assert copy.data_ptr() % 16 == 0 and torch.equal(copy, view)
    plain = torch.zeros(8, 8)
    assert launching.launchable(plain) is plain


def test_rows_are_compared_by_powers_of_two() -> None:
    ms = sorted({log2(row.shape[0]) for row in rows("gemm_swiglu_bwd")})
    assert ms[0] == 7 and ms[-1] == 14
