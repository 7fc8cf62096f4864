"""Without a GPU, these tests check which tensors a plan passes to each launch. Stand-ins for the kernels
record their arguments."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from typing import Any

import kernels
import pytest
import torch

from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable, lower
from coda_agent.primitives.compiler.probe_schedules import candidates
from coda_agent.primitives.lang.interpret import solve_sizes, torch_dtype
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import launch, tune
from coda_agent.primitives.runtime.executable import GAP, Plan
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.runtime.launchable import LaunchError, alignment_errors

SIZES = {"M": 100, "K": 64, "N": 200, "D": 64, "F": 104, "P": 64, "H": 3, "V": 200}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    recorded: list[tuple[str, tuple[Any, ...]]] = []

    def stand_in(lowered: Any, kernel: Any, *rest: Any) -> Callable[..., None]:
        return lambda *arguments: recorded.append((kernel.name, arguments))

    monkeypatch.setattr("coda_agent.primitives.runtime.executable.compile_gemm", stand_in)
    monkeypatch.setattr("coda_agent.primitives.runtime.executable.compile_vector", stand_in)
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", lambda size: 132 // size)
    return recorded


def planned(program: Program, schedule: Schedule | None = None) -> tuple[Plan, Any, Any]:
    steps = sum(n.op == "gemm" for n in program.nodes)
    sizes = {d: SIZES[d] for d in program.signature.dims}
    plan = Plan(KernelSource(program, dict.fromkeys(range(steps), schedule or Schedule())), sizes, "cpu")
    return plan, inputs_of(program, sizes), plan.outputs()


def inputs_of(program: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros([d(sizes) for d in t.shape], dtype=torch_dtype(t.dtype))
        for name, t in program.signature.inputs.items()
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def test_outputs_have_the_specs_shapes_and_dtypes(calls):
    plan, _, outputs = planned(kernels.NORM.program)
    assert {n: (tuple(t.shape), t.dtype) for n, t in outputs.items()} == {
        "h": ((100, 200), torch.bfloat16),
        "hg": ((100, 200), torch.bfloat16),
        "rstd": ((100,), torch.float32),
    }


def test_parts_run_by_themselves(calls):
    plan, inputs, outputs = planned(kernels.NORM.program)
    assert plan.parts == [("gemm", 0), ("vector", 0)]
    plan.run(inputs, outputs)
    (gemm, gemm_given), (finish, finish_given) = calls
    calls.clear()
    plan.run_parts([("vector", 0)], inputs, outputs)
    plan.run_parts([("gemm", 0)], inputs, outputs)
    assert [name for name, _ in calls] == [finish, gemm]
    assert all(one is other for one, other in zip(calls[0][1][:-1], finish_given[:-1], strict=True))


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
    # 200 columns make two tiles of 160 columns
    assert partial.shape == (1, 100, 2) and partial.dtype == torch.float32
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
        for t in plan.kept.values()
        if isinstance(t, torch.Tensor)
    )
    assert len(spans) >= 2
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    storages = {t.untyped_storage().data_ptr() for t in plan.kept.values() if isinstance(t, torch.Tensor)}
    assert len(storages) == 1
    assert all(start % 256 == spans[0][0] % 256 for start, _ in spans)


def test_what_earlier_steps_leave_lies_where_it_did_whatever_tile_a_later_one_has(calls):
    signature = kernels.signature(
        {"x": kernels.tensor("M, K"), "w": kernels.tensor("N, K"), "v": kernels.tensor("P, K")},
        {"o": kernels.tensor("M, P"), "total": kernels.tensor("M", "fp32")},
    )
    lines = (
        "rstd = rsqrt(row_sums(gemm(x, w.mT)) + 1)",
        "o = gemm(x, v.mT) * per_row(rstd)",
        "return {'o': o, 'total': row_sums(o)}",
    )
    program, sizes = kernels.trace(signature, *lines), {"M": 100, "K": 64, "N": 200, "P": 264}
    first = Plan(KernelSource(program, dict.fromkeys(range(2), Schedule())), sizes, "cpu")
    wider = KernelSource(program, {0: Schedule(), 1: Schedule(128, 256, False)})
    wide = Plan(wider, sizes, "cpu", first.workspace)
    rows = []
    for plan in (first, wide):
        plan.run(inputs_of(program, sizes), plan.outputs())
        epilogue = calls[-2][1][4]  # calls[-2] is the second GEMM; its finishing kernel comes last
        (row,) = (getattr(epilogue, a.name) for a in plan.lowered.gemms[1].arguments if a.role == "row")
        rows.append(row)
    assert same(*rows) and rows[0].shape == (100,)


def test_a_workspace_s_gaps_are_all_of_it_in_which_nothing_lies(calls):
    first, _, _ = planned(kernels.CHAIN.program, Schedule(128, 128))
    wider = KernelSource(first.program, {0: Schedule(128, 256, False), 1: Schedule()})
    wide = Plan(wider, first.sizes, "cpu", first.workspace)
    none, _, _ = planned(kernels.ACCUMULATE.program)
    for plan in (first, wide, none):
        lies = [t for t in plan.kept.values() if isinstance(t, torch.Tensor)]
        plan.workspace.fill_(0)
        for tensor in (*lies, *plan.gaps):
            tensor.view(-1).view(torch.uint8).add_(1)
        assert bool((plan.workspace == 1).all())
        assert len(plan.gaps) == len(lies) + 1
        assert all(gap.numel() >= GAP for gap in plan.gaps[:-1] or plan.gaps)
    assert none.workspace.numel() == GAP


def test_a_plan_s_workspace_is_freed_with_it(calls):
    plan, inputs, outputs = planned(kernels.CHAIN.program)
    plan.run(inputs, outputs)
    assert plan(inputs).keys() == outputs.keys()
    calls.clear()
    workspace = weakref.ref(plan.workspace)
    gc.disable()  # the workspace must be freed at once: GPU memory cannot wait for a garbage collection
    try:
        del plan
        assert workspace() is None
    finally:
        gc.enable()


def test_a_second_call_takes_its_own_tensors(calls):
    plan, inputs, outputs = planned(kernels.BACKWARD.program)
    plan.run(inputs, outputs)
    others = {name: t.clone() for name, t in inputs.items()}, {n: t.clone() for n, t in outputs.items()}
    plan.run(*others)
    again = calls[2][1]
    assert again[0] is others[0]["dy"] and same(again[3], others[0]["z"]) and same(again[2], others[1]["dz"])


def given(plan: Plan, call: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the arguments of a launch, by name."""
    name, arguments = call
    gemm = next((g for g in plan.lowered.gemms if g.name == name), None)
    if gemm is not None:
        return {a.name: getattr(arguments[4], a.name) for a in gemm.arguments}
    (vector,) = (v for v in plan.lowered.vectors if v.name == name)
    return dict(zip([a.name for a in vector.arguments], arguments, strict=True))


def by_role(plan: Plan, call: tuple[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    gemms, vectors = plan.lowered.gemms, plan.lowered.vectors
    arguments = {k.name: k.arguments for k in gemms} | {k.name: k.arguments for k in vectors}
    for argument in arguments[call[0]]:
        found.setdefault(argument.role, []).append(given(plan, call)[argument.name])
    return found


def test_heads_vectors_and_memory_cross_as_they_are(calls):
    plan, inputs, outputs = planned(kernels.QK_NORM.program)
    plan.run(inputs, outputs)
    (call,) = calls
    found = by_role(plan, call)
    assert found["head"] == [None]  # the head's width is a constant in the compiled kernel
    assert found["row"] == [inputs["positions"]] and call[1][2] is outputs["q"]
    assert {id(t) for t in found["memory"]} == {
        id(inputs["gamma"]), id(inputs["inv_freq"]), id(outputs["rstd"])
    }  # fmt: skip
    assert [float(s.value) for s in found["scalar"]] == [64.0]


def test_a_scalar_in_memory_crosses_as_its_address(calls):
    plan, inputs, outputs = planned(kernels.ALPHA.program)
    plan.run(inputs, outputs)
    step, finish = calls
    assert by_role(plan, step)["pointer"] == [inputs["alpha"].data_ptr()]
    (listed,) = by_role(plan, finish)["pointer"]
    assert listed.shape == (1,) and same(listed, inputs["alpha"])


def test_selections_start_at_minus_infinity_in_a_buffer_of_their_own(calls):
    plan, inputs, outputs = planned(kernels.CROSS_ENTROPY.program)
    plan.run(inputs, outputs)
    step, finish = calls
    found = by_role(plan, step)
    assert found["index"] == [inputs["target"]]
    lse, selected = sorted(found["partial"], key=lambda t: -t.ndim)
    assert lse.shape == (1, 100, 2) and selected.shape == (100,)
    assert bool((selected == -math.inf).all())
    assert selected.untyped_storage().data_ptr() != plan.workspace.untyped_storage().data_ptr()
    last = by_role(plan, finish)
    assert any(t is selected for t in last["partial"]) and any(t is lse for t in last["partial"])
    assert [float(e.value) for e in last["extent"]] == [200.0] and last["vector"] == [inputs["target"]]


def test_partials_of_columns_are_a_row_a_tile_and_two_for_twice_as_many(calls):
    plan, inputs, outputs = planned(kernels.WIDTHS.program, Schedule(192, 128))
    plan.run(inputs, outputs)
    shapes = sorted(tuple(t.shape) for t in by_role(plan, calls[0])["partial"])
    # The gemm's 208 columns make two tiles of 128, and the 100 rows make one tile. Three partials hold a
    # value for each column. The other three hold two values for each row, one for each tile.
    assert shapes == [(1, 1, 208)] * 3 + [(1, 100, 2)] * 3
    plan, inputs, outputs = planned(kernels.NORM_BACKWARD.program)
    (partial,) = (t for t in plan.kept.values() if isinstance(t, torch.Tensor))
    assert partial.shape == (1, 1, 200)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept tensors on the CPU as if they were on a GPU."""
    monkeypatch.setattr(
        launch,
        "check_tensors",
        lambda signature, inputs, given: solve_sizes(
            signature, {k: tuple(t.shape) for k, t in inputs.items()}, given
        ),
    )


def test_an_update_is_written_into_the_inputs_own_tensor(calls, anywhere):
    kernel = Kernel(KernelSource(kernels.ACCUMULATE.program, {0: Schedule()}))
    _, inputs, _ = planned(kernels.ACCUMULATE.program)
    calls.clear()
    outputs = kernel(**inputs)
    (_, (a, b, d, c, *_)) = calls[0]
    # the kernel's store adds to the previous values in dw, so the launch does not also pass dw as c
    assert outputs["dw_new"] is inputs["dw"] is d and c is None
    assert same(a, inputs["dy"]) and a.shape == (200, 100) and b is inputs["x"]


def test_the_only_input_of_a_kernel_is_passed_whole(calls, anywhere):
    signature = kernels.signature({"x": kernels.tensor("M, K")}, {"y": kernels.tensor("M, M")})
    program = kernels.trace(signature, "return {'y': gemm(x, x.mT)}")
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    Kernel(KernelSource(program, {0: Schedule()}))(x=x)
    assert calls[0][1][0] is x


def test_an_edited_text_runs_on_what_its_report_says_it_was_proved_on(calls, anywhere, monkeypatch, tmp_path):
    program, inputs = kernels.NORM.program, planned(kernels.NORM.program)[1]
    text = editable(program) + "# edited\n"
    path, raw = tmp_path / "norm.program.json", tmp_path / "norm.raw.py"
    path.write_text(program.to_json())
    raw.write_text(text)
    proved = [Schedule(128, 128), Schedule(128, 192, swizzle=4), Schedule(128, 128)]
    report = {"identity": {"lowered_hash": KernelSource(program, edited=text).lowered.hash}}
    report["timings"] = [{"schedules": {"0": schedule.to_json()}} for schedule in proved]
    (tmp_path / "norm.raw.report.json").write_text(json.dumps(report))
    raced = []

    def tuned(kernel, inputs, sizes, known):
        raced.append(known)
        return {0: known[0][0]}

    monkeypatch.setattr(launch, "tuned_schedules", tuned)
    Kernel.load(path, edited=raw).plan(inputs)
    assert raced == [{0: proved[:2]}]
    unproved = "step 0: the edited text was verified on no schedule that fits"
    raw.write_text(text + "# again\n")  # this text is no longer the measured text
    with pytest.raises(LaunchError, match=unproved):
        Kernel.load(path, edited=raw).plan(inputs)
    Kernel.load(path, {0: Schedule()}, raw).plan(inputs)  # a schedule that the caller chooses needs no report
    assert len(raced) == 1


def test_an_accepted_kernel_is_loaded_by_its_name_wherever_the_process_runs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    loaded = Kernel.load("gemm_swiglu")
    assert loaded.program == Kernel.load(launch.KERNELS / "gemm_swiglu.program.json").program
    with pytest.raises(FileNotFoundError, match="no accepted kernel has this name.*gemm_swigluu"):
        Kernel.load("gemm_swigluu")


def test_a_sum_into_another_tensor_starts_from_the_inputs_values(calls):
    plan, inputs, outputs = planned(kernels.ACCUMULATE.program)
    inputs["dw"].fill_(3.0)
    plan.run(inputs, outputs)
    assert calls[0][1][2] is outputs["dw_new"] and bool((outputs["dw_new"] == 3.0).all())


def test_one_row_and_vectors_of_it(calls):
    program = kernels.CROSS_ENTROPY.program
    plan = Plan(KernelSource(program, {0: Schedule()}), {"M": 1, "D": 64, "V": 136}, "cpu")
    assert [tuple(t.shape) for t in plan.outputs().values()] == [(1, 136), (1,), (1,)]
    assert (1, 1, 2) in [tuple(t.shape) for t in plan.kept.values() if isinstance(t, torch.Tensor)]


def test_one_row_gets_the_strides_of_a_row_and_stays_where_it_is(calls, anywhere):
    kernel = Kernel(KernelSource(kernels.IN_PLACE.program, {0: Schedule()}))
    w = torch.zeros(200, 64, dtype=torch.bfloat16)
    inputs = {"x": w[:64, :1].clone().mT, "w": w, "d": w[:, :1].clone().mT}
    assert inputs["x"].stride() == inputs["d"].stride() == (1, 1)
    outputs = kernel(**inputs)
    (_, (x, b, d, c, *_)) = calls[0]
    assert x.stride() == (64, 1) and same(x, inputs["x"]) and b is w
    assert d.stride() == c.stride() == (200, 1) and same(d, c) and same(d, inputs["d"])
    assert outputs["o"] is inputs["d"]  # the caller's own tensor is returned


def test_statistics_of_heads_need_no_alignment():
    sizes = {"M": 8, "K": 64, "H": 3, "P": 64}
    # the three fp32 values of a row are stored one by one, so they need no alignment
    assert alignment_errors(kernels.QK_NORM.program, sizes) == []
    (error,) = alignment_errors(kernels.ROPE.program, sizes | {"P": 2, "H": 4})
    assert error.startswith("cos_sin: rows of 4 bf16")


@pytest.mark.parametrize("width", [40, 8, 24, 104, 256])
def test_heads_that_fit_no_tile_are_named_before_anything_is_compiled(calls, monkeypatch, tmp_path, width):
    program = kernels.QK_NORM.program
    sizes = {"M": 100, "K": 64, "H": 3, "P": width}
    least = r"\(head widths are multiples of 8; of 32 for head_sums and parts\)"
    said = f"whole heads of {2 * width} columns {least}"
    with pytest.raises(LaunchError, match=rf"step 0: a tile of 128 columns does not hold {said}"):
        Plan(KernelSource(program, {0: Schedule()}), sizes, "cpu")
    (kernel,) = lower(program).gemms
    assert candidates(kernel, sizes) == []
    monkeypatch.setattr(tune, "cache_path", lambda *given: tmp_path / "none")
    with pytest.raises(LaunchError, match=f"step 0: no tile holds {said}"):
        tune.tuned_schedules(KernelSource(program), {}, sizes)
    assert not calls and not list(tmp_path.iterdir())


def test_a_tile_that_pairs_do_not_fit_is_named(calls):
    with pytest.raises(LaunchError, match="208 columns does not hold multiples of 32 columns for its pairs"):
        planned(kernels.SWIGLU.program, Schedule(128, 208))


@pytest.mark.parametrize("line", ["gemm(x, w, offsets)", "gemm(d.mT, x, offsets)"], ids=["rows", "own"])
def test_experts_are_tuned_in_one_launch(calls, monkeypatch, tmp_path, line):
    """A GEMM with offsets, in which rows belong to experts, refuses a schedule with two launches. Tuning once
    tried such schedules in its second round and failed."""
    shape = kernels.tensor
    inputs = {"x": shape("T, K"), "offsets": shape("E + 1", "int32")}
    inputs |= {"w": shape("E, K, N")} if "w" in line else {"d": shape("T, N")}
    given = kernels.signature(inputs, {"y": shape("T, N" if "w" in line else "E, N, K")})
    program = kernels.trace(given, f"return {{'y': {line}}}")
    sizes = {"T": 4096, "K": 2048, "N": 2048, "E": 4}
    (gemm,) = lower(program).gemms
    start = candidates(gemm, sizes)
    # The test needs a large output: for a small output, tuning tries no schedule with two launches, so the
    # test would show nothing. Only a small output has candidate tiles of 64 columns.
    assert not any(s.tile_n == 64 for s in start)
    rounds = []

    def race(running, number):
        rounds.append([schedule for schedule, _ in running])
        return [(schedule, float(i)) for i, (schedule, _) in enumerate(running)]

    monkeypatch.setattr(tune, "compile_all", lambda kernel, sizes, asked: [True for _ in asked])
    monkeypatch.setattr(tune, "race_calls", race)
    monkeypatch.setattr(tune, "cache_path", lambda *given: tmp_path / "kept")
    tune.tuned_schedules(KernelSource(program), inputs_of(program, sizes), sizes)
    assert len(rounds) == 3
    raced = {s for each in rounds for s in each}
    assert {s.cluster_m * s.cluster_n for s in raced} == {2, 4} and all(gemm.admits(s, sizes) for s in raced)
    assert not any(s.split for s in tune.within_reach(gemm, sizes, start[:2]))
    with pytest.raises(LaunchError, match="step 0: two launches cannot share rows that belong to experts"):
        Plan(KernelSource(program, {0: Schedule(128, 128, True, 2, 2, split=True)}), sizes, "cpu")


def test_steps_wait_for_their_turn_on_tiles_that_they_admit(monkeypatch, tmp_path):
    """Heads of 96 columns fit only tiles of 192 columns. While the first step is tuned, the second step must
    therefore not use a default schedule."""
    shape = kernels.tensor
    declared = kernels.signature(
        {"x": shape("M, K"), "w": shape("N, K"), "q": shape("2*H*P, N"), "turns": shape("M, 2*P")},
        {"o": shape("M, 2*H*P")},
        ("P",),
    )
    program = kernels.trace(declared, "t = gemm(x, w.mT)", "return {'o': gemm(t, q.mT) * per_head(turns)}")
    sizes = {"M": 8, "K": 64, "N": 64, "H": 2, "P": 48}
    gemms = lower(program).gemms
    beside = []

    def race(kernel, gemm, inputs, sizes, schedules, rounds):
        beside.append(kernel.schedules)
        assert schedules and all(gemm.admits(s, sizes) for s in schedules)
        return [(s, float(i)) for i, s in enumerate(schedules)]

    monkeypatch.setattr(tune, "_race", race)
    monkeypatch.setattr(tune, "cache_path", lambda *given: tmp_path / "kept")
    # the first known schedule fits only heads of another width
    known = {1: [Schedule(), Schedule(128, 192, swizzle=4)]}
    chosen = tune.tuned_schedules(KernelSource(program), {}, sizes, known)
    assert beside and all(g.admits(others[g.step], sizes) for others in beside for g in gemms)
    assert chosen[1] == Schedule(128, 192, swizzle=4)
    raced = len(beside)
    assert tune.tuned_schedules(KernelSource(program), {}, sizes) == chosen and len(beside) == raced
    assert (
        tune.tuned_schedules(KernelSource(program), {}, sizes, known, afresh=True) == chosen
        and len(beside) > raced
    )


def test_tuning_leaves_the_callers_tensors_as_they_are(calls, monkeypatch, tmp_path):
    program = kernels.ACCUMULATE.program
    sizes = {d: 64 for d in program.signature.dims}
    inputs = inputs_of(program, sizes)
    given = []

    def race(running, rounds):
        for _, call in running:
            call()
        given.extend(arguments[2] for _, arguments in calls)
        return [(schedule, 1.0) for schedule, _ in running]

    monkeypatch.setattr(tune, "compile_all", lambda kernel, sizes, asked: [True for _ in asked])
    monkeypatch.setattr(tune, "race_calls", race)
    monkeypatch.setattr(tune, "cache_path", lambda *given: tmp_path / "kept")
    tune.tuned_schedules(KernelSource(program), inputs, sizes)
    assert given and not any(same(written, inputs["dw"]) for written in given)


@pytest.mark.parametrize("name", kernels.EXAMPLES)
def test_two_launches_of_a_step_share_its_rows(name, calls, monkeypatch):
    """A tensor with an axis along the rows is cut where a tile ends, and each launch gets one of the two
    parts. Both launches get every other tensor whole."""
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", {1: 8, 4: 1}.__getitem__)
    program, split = kernels.EXAMPLES[name].program, Schedule(128, 128, True, 2, 2, split=True)
    gemms = lower(program).gemms
    (rows,) = {str(gemm.shape[0]) for gemm in gemms}
    sizes = {d: SIZES[d] for d in program.signature.dims} | {rows: 1000}
    # each input lies inside a larger tensor
    inputs = {n: torch.stack((t, t))[1] for n, t in inputs_of(program, sizes).items()}
    whole = Plan(KernelSource(program, {g.step: split._replace(split=False) for g in gemms}), sizes, "cpu")
    outputs = whole.in_place(inputs)
    whole.run(inputs, outputs)
    once = [*calls]
    halves = KernelSource(program, {g.step: split for g in gemms})
    Plan(halves, sizes, "cpu", whole.workspace).run(inputs, outputs)
    twice = calls[len(once) :]
    assert [n for n, _ in twice] == [n for n, _ in once for _ in range(1 + n.startswith("Step"))]
    for gemm in gemms:
        one, first, second = (flat(given) for called, given in calls if called == gemm.name)
        for entire, upper, lower_part in zip(one, first, second, strict=True):
            axes = [i for i, n in enumerate(entire.shape) if n in (1000, 8)]
            if not axes:
                assert upper.shape == lower_part.shape == entire.shape
                assert upper.data_ptr() == lower_part.data_ptr()
                continue
            (axis,) = axes
            cut = 512 if entire.shape[axis] == 1000 else 4
            assert (upper.shape[axis], lower_part.shape[axis]) == (cut, entire.shape[axis] - cut)
            past = cut * entire.stride(axis) * entire.element_size()
            assert lower_part.data_ptr() == upper.data_ptr() + past


def test_views_of_what_no_call_changes_are_taken_once(calls, monkeypatch):
    monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", {1: 8, 4: 1}.__getitem__)
    program, split = kernels.NORM.program, Schedule(128, 128, True, 2, 2, split=True)
    plan = Plan(KernelSource(program, {0: split}), {"M": 1000, "K": 64, "N": 256}, "cpu")
    inputs, outputs = inputs_of(program, plan.sizes), plan.outputs()
    plan.run(inputs, outputs)
    plan.run(inputs, outputs)
    once, again = ([t for n, given in half if "Step" in n for t in flat(given)] for half in halves(calls))
    same = [tensor is other for tensor, other in zip(once, again, strict=True)]
    in_workspace = [t.untyped_storage().data_ptr() == plan.workspace.data_ptr() for t in once]
    assert any(in_workspace) and all(same[i] for i, inside in enumerate(in_workspace) if inside)


def halves(calls: list[Any]) -> tuple[list[Any], list[Any]]:
    return calls[: len(calls) // 2], calls[len(calls) // 2 :]


def flat(given: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that a GEMM is launched with."""
    operands, epilogue = given[:4], given[4]
    return [value for value in (*operands, *epilogue) if isinstance(value, torch.Tensor)]


def test_a_step_with_no_share_for_a_second_launch_has_one(calls, monkeypatch):
    program, split = kernels.NORM.program, Schedule(128, 128, True, 2, 2, split=True)
    for rows, idle, launches in ((1000, 4, 2), (1000, 0, 1), (256, 4, 1)):
        count = {1: 4 + idle, 4: 1}
        monkeypatch.setattr("quack.cute_dsl_utils.get_max_active_clusters", count.__getitem__)
        sizes = {d: SIZES[d] for d in program.signature.dims} | {"M": rows}
        plan = Plan(KernelSource(program, {0: split}), sizes, "cpu")
        calls.clear()
        plan.run(inputs_of(program, sizes), plan.outputs())
        assert sum(name.startswith("Step") for name, _ in calls) == launches


def test_tensors_off_the_gpu_are_refused_before_anything_runs(calls):
    program = kernels.SWIGLU.program
    _, inputs, _ = planned(program)
    with pytest.raises(LaunchError, match="one CUDA device; they are on cpu"):
        Kernel(KernelSource(program, {0: Schedule()}))(**inputs)
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
    narrow = Plan(KernelSource(program, {0: Schedule(128, 128), 1: Schedule(128, 128)}), sizes, "cpu")
    wider = KernelSource(program, {0: Schedule(128, 256, False), 1: Schedule()})
    wide = Plan(wider, sizes, "cpu", narrow.workspace)
    assert wide.workspace is narrow.workspace
    small = torch.empty(1, dtype=torch.uint8)
    usual = KernelSource(program, {0: Schedule(), 1: Schedule()})
    assert Plan(usual, sizes, "cpu", small).workspace is not small


def test_rows_that_are_no_multiple_of_16_bytes_are_named():
    program = kernels.SWIGLU.program
    assert alignment_errors(program, {"M": 3, "D": 520, "F": 520}) == []
    (error,) = alignment_errors(program, {"M": 8, "D": 520, "F": 516})
    assert error.startswith("act: rows of 516 bf16")
