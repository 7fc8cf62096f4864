"""Tests of the profile of the layer's backward: parsing synthetic traces, grouping kernels, the time budget,
and the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.by_hand import measuring as by_hand
from benchmarks.by_hand.runners import accepted_programs, calls
from benchmarks.layer_profile import bench as benches
from benchmarks.layer_profile import ledger, traces
from benchmarks.layer_profile.__main__ import main
from benchmarks.layer_profile.ledger import ATTENTION, DATA, PASSES, UNKNOWN, WEIGHTS
from benchmarks.layer_profile.measuring import TimeBudget, run
from benchmarks.layer_profile.page import write
from coda_agent.comparison.competitors import COMPILE, EAGER, PROGRAM
from coda_agent.comparison.layers import variant
from coda_agent.comparison.layers.shape import WIDTHS, Shape, draw
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime.launch import Kernel

T, D, F = 16384, 2048, 5632
SIZES = {"tokens": T, "width": D, "ffn": F, "heads": 32, "sequences": 8, "length": 2048}
STEP, FINISH = (
    "kernel_cutlass_kernel_coda_lowered_8aStep0_8a_object_0",
    "kernel_coda_lowered_8aFinish1_20_8a_1",
)
NORM, DGAMMA = "kernel_coda_lowered_5aStep0_5a_object_0", "kernel_coda_lowered_5aFinish1_8_5a_1"
NVJET, FLASH, CONVERT = "nvjet_sm90_tst_128x256", "flash_bwd_dq_dk_dv_loop_seqk", "flash_bwd_convert_dq"
FILL, DIV = "void at::native::vectorized_elementwise_kernel<FillFunctor>", "at::native::DivFunctor"
TRITON = "triton_red_fused_cat_mul_sum_0"
SDPA = "aten::_scaled_dot_product_flash_attention_backward"
BF16 = "c10::BFloat16"

Launch = tuple[str, float, str, list[list[int]]]  # kernel, microseconds, operator, shapes
OURS: list[Launch] = [
    (STEP, 600.0, "", []),
    (STEP, 60.0, "", []),
    (FINISH, 5.0, "", []),
    (NVJET, 620.0, "aten::mm", [[D, T], [T, F]]),
    (DIV, 2.0, "aten::div", [[T], []]),
    (NORM, 1200.0, "", []),
    (DGAMMA, 4.0, "", []),
    (NVJET, 1250.0, "aten::mm", [[2 * F, T], [T, D]]),
    (NVJET, 220.0, "aten::mm", [[T, D], [D, D]]),
    (FILL, 10.0, "aten::fill_", [[T, D]]),
    (FLASH, 1500.0, SDPA, [[8, 32, 2048, 64]]),
    (CONVERT, 30.0, SDPA, [[8, 32, 2048, 64]]),
    (TRITON, 150.0, TRITON, [[8, 32, 2048, 64], [T, 3 * D], []]),
    (NORM, 640.0, "", []),
    (DGAMMA, 4.0, "", []),
]
THEIRS: list[Launch] = [
    (NVJET, 590.0, "aten::mm", [[T, D], [D, F]]),
    ("triton_poi_fused_silu_backward", 200.0, "triton_poi_fused_silu_backward", [[T, F], [T, 2 * F]]),
    (NVJET, 630.0, "aten::mm", [[F, T], [T, D]]),
    (NVJET, 1210.0, "aten::mm", [[T, 2 * F], [2 * F, D]]),
    (FLASH, 1490.0, SDPA, [[8, 32, 2048, 64]]),
]
PARTS = [
    {"place": p, "operator": "o", "kind": kind, "kernel": name, "flops": flops, "bytes": 10**9}
    for p, kind, name, flops in (
        ("down_backward", "gemm", "Step0_8a", 2 * T * D * F),
        ("down_backward", "vector", "Finish1_20_8a", 0),
        ("gate_up_backward", "gemm", "Step0_5a", 4 * T * D * F),
        ("gate_up_backward", "vector", "Finish1_8_5a", 0),
        ("qkv_backward", "gemm", "Step0_5a", 6 * T * D * D),
        ("qkv_backward", "vector", "Finish1_8_5a", 0),
    )
]

SMALL = Shape(heads=2, head_width=32, ffn=96, sequences=2, length=48)


class Tape:
    """Build a Chrome trace like the traces that torch.profiler writes. The GPU is idle for ``rest``
    microseconds before each kernel."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self.now, self.host, self.calls = 100.0, 0.0, 0

    def kernel(self, name: str, duration: float, rest: float = 1.5) -> None:
        args = {"grid": [132, 1, 1], "block": [384, 1, 1], "stream": 7, "registers per thread": 168}
        args["External id"] = self.calls
        self.now += rest
        told = {"ph": "X", "cat": "kernel", "name": name, "ts": self.now, "dur": duration, "args": args}
        self.events.append(told)
        self.now += duration

    def operator(self, name: str, dims: list[list[int]], length: float = 2.0) -> None:
        self.calls += 1
        args = {"External id": self.calls, "Input Dims": dims, "Input type": [BF16] * len(dims)}
        told = {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": self.host, "dur": length}
        self.events.append({**told, "args": args})
        self.host += 0.5

    def region(self, launches: Sequence[Launch], *, ops: bool = False, slower: float = 1.0) -> None:
        self.kernel("a forward's kernel", 50.0)
        self.kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 100.0)
        before = ("", [[0]])
        for name, duration, op, dims in launches:
            if ops and op and (op, dims) != before:
                self.host += 10.0
                if op == "aten::fill_":
                    self.operator(SDPA, dims, 5.0)
                self.operator(op, dims)
            before = op, dims
            calls, self.calls = self.calls, self.calls if op else 0
            self.kernel(name, duration * slower)
            self.calls = calls
        self.kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 1.0)

    def trace(self) -> dict[str, Any]:
        return {"traceEvents": self.events[::-1]}


def profile() -> dict[str, Any]:
    """Return what the stages ``kernels`` and ``operators`` would return for the synthetic traces."""
    tape, shaped = Tape(), Tape()
    for slower in (1.0, 1.1):
        tape.region(OURS, slower=slower)
        tape.region(THEIRS, slower=slower)
    shaped.region(OURS, ops=True)
    shaped.region(THEIRS, ops=True)
    found, told = traces.regions(tape.trace(), 4), traces.regions(shaped.trace(), 2)
    names = (PROGRAM, COMPILE)
    return {
        "backward": {name: traces.summary(found[i::2]) for i, name in enumerate(names)},
        "operators": {name: traces.operators(shaped.trace(), told[i]) for i, name in enumerate(names)},
        "backward_conditions": {"sm_mhz": [1300.0, 1400.0, 1500.0]},
    }


def entry() -> dict[str, Any]:
    return {"failed": {}, "seconds": {}, "sizes": SIZES, "ours": PARTS, **profile()}


def test_kernels_between_markers_are_kept_with_their_gaps() -> None:
    found = profile()["backward"][PROGRAM]
    assert [k["name"] for k in found["kernels"]] == [name for name, *_ in OURS]
    assert found["kernels"][0]["microseconds"] == [600.0, 660.0]
    assert found["kernels"][0]["gap"] == [1.5, 1.5]
    assert found["kernels"][0]["grid"] == (132, 1, 1)


def test_a_gap_is_negative_where_kernels_overlap() -> None:
    tape = Tape()
    tape.kernel("spin_kernel", 1.0)
    tape.kernel("first", 10.0)
    tape.kernel("inside", 3.0, -5.0)
    tape.now += 2.0
    tape.kernel("last", 1.0, 4.0)
    tape.kernel("spin_kernel", 1.0)
    (region,) = traces.regions(tape.trace(), 1)
    assert region.gaps() == pytest.approx([1.5, -5.0, 6.0])
    assert sum(region.gaps()) + 14 == pytest.approx(region.events[-1].end - region.begin)


def test_a_region_with_other_kernels_is_dropped_and_counted() -> None:
    tape = Tape()
    for launches in (THEIRS, THEIRS[:-1], THEIRS):
        tape.region(launches)
    found = traces.summary(traces.regions(tape.trace(), 3))
    assert found["dropped"] == 1 and len(found["kernels"][0]["microseconds"]) == 2


def test_a_trace_without_its_markers_says_so() -> None:
    with pytest.raises(traces.TraceError, match="0 markers among 0 activities"):
        traces.regions({"traceEvents": []}, 2)


def test_kernels_are_grouped_by_what_they_compute() -> None:
    rows = ledger.rows(entry(), PROGRAM)
    assert [(row.share.what, row.share.group) for row in rows] == [
        ("dy @ Wd", DATA),
        ("finish of dy @ Wd", PASSES),
        ("dWd = dy' @ act", WEIGHTS),
        ("aten::div", PASSES),
        ("dz @ Wgu", DATA),
        ("finish of dz @ Wgu", PASSES),
        ("dWgu = dz' @ hn1", WEIGHTS),
        ("dh1 @ Wo", DATA),
        ("attention", ATTENTION),
        ("attention", ATTENTION),
        ("attention", ATTENTION),
        (TRITON, PASSES),
        ("dqkv @ Wqkv", DATA),
        ("finish of dqkv @ Wqkv", PASSES),
    ]
    first, *_, attention, _, triton, norm, _ = rows
    # the row's time includes the gap between its two kernels
    assert len(first.names) == 2 and first.taken[0] == pytest.approx(661.5)
    assert [row.share.flops for row in rows[8:11]] == [None, 5 * T * 2048 * D, None]
    assert attention.share.flops and triton.share.bytes == 2 * (T * D + 3 * T * D)
    assert norm.share.flops == 6 * T * D * D and norm.bound == pytest.approx(6 * T * D * D / 640e6)


def test_a_compiled_backward_is_told_by_shapes() -> None:
    rows = ledger.rows(entry(), COMPILE)
    assert [row.share.what for row in rows][::2] == ["dy @ Wd", "dWd = dy' @ act", "attention"]
    assert rows[2].share.flops == 2 * T * D * F and rows[3].share.what == "dz @ Wgu"


def test_groups_and_gaps_add_up_to_the_whole() -> None:
    found = entry()
    sums = ledger.groups(ledger.rows(found, PROGRAM))
    kernels = found["backward"][PROGRAM]["kernels"]
    whole = sum(sum(k["microseconds"]) + sum(k["gap"]) for k in kernels) / 2
    assert sum(sums.values()) == pytest.approx(whole)
    assert sums[ATTENTION] == pytest.approx(1.05 * 1540) and sums[UNKNOWN] == 0


def test_without_operators_products_are_not_told_apart() -> None:
    found = entry() | {"operators": {}}
    sums = ledger.groups(ledger.rows(found, COMPILE))
    assert sums[UNKNOWN] == pytest.approx(1.05 * 2430) and sums[WEIGHTS] == 0


def test_our_parts_are_those_of_the_programs() -> None:
    shape = WIDTHS["1B"]
    programs = accepted_programs()
    kernels = {c: Kernel(KernelSource(programs[c.operator], {0: Schedule()})) for c in calls(shape).values()}
    parts = benches.backward_parts(shape, kernels)
    assert [(p["place"], p["kind"]) for p in parts] == [(p["place"], p["kind"]) for p in PARTS]
    assert parts[0]["flops"] == 2 * T * D * F and parts[2]["kernel"] == parts[4]["kernel"]
    # SwiGLU's backward has to write dz and act, and to read z, dy and Wd. Each element has 2 bytes.
    assert parts[0]["bytes"] >= 2 * (T * 5 * F + T * D + D * F)


def test_kernels_without_schedules_race_those_of_the_width() -> None:
    call = calls(WIDTHS["7B"])["qkv_backward"]
    unknown = Kernel(KernelSource(accepted_programs()[call.operator]))
    found = by_hand.on_known_schedules(call, unknown, "7B")
    assert not found.source.schedules and found.known and len(found.known[0]) > 1
    fixed = Kernel(KernelSource(unknown.program, {0: Schedule()}))
    assert by_hand.on_known_schedules(call, fixed, "7B") is fixed
    assert by_hand.on_known_schedules(call, unknown, "no such width") is unknown


def test_a_turn_runs_each_backward_after_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: marks.append(cycles))
    marks: list[int] = []
    drawn, made = draw(SMALL, 0, "cpu"), benches.LayerStages("1B", (EAGER, "again"))
    for name in made.names:
        layer = variant(EAGER, SMALL, drawn)
        made.backwards[name] = benches.Backward(layer, layer.start(drawn.x), drawn.dout)
    made._turn()
    made._turn()
    assert marks == [benches.HEAD_START, 1] * 4
    assert all(each.saved is None for each in made.backwards.values())


def test_torch_writes_the_traces_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "_synchronize", lambda: None)
    a = torch.ones(3, 4)
    trace = benches.record(lambda: torch.mm(a, a.mT), shapes=True)
    (op,) = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and e["name"] == "aten::mm"]
    assert op["args"]["Input Dims"][:2] == [[3, 4], [4, 3]] and op["args"]["External id"]


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Fake:
    """Stands in for the stages of a profile. Each stage takes ``seconds`` on ``clock``; the stage named
    ``broken`` fails."""

    def __init__(self, clock: Clock, seconds: float, broken: str = "") -> None:
        self.clock, self.seconds, self.broken = clock, seconds, broken
        self.built: list[tuple[str, tuple[str, ...]]] = []
        self.closed = 0

    def __call__(self, width: str, arms: Sequence[str]) -> Fake:
        self.built.append((width, tuple(arms)))
        return self

    def _take(self, stage: str, found: dict[str, Any]) -> dict[str, Any]:
        self.clock.time += self.seconds
        if stage == self.broken:
            raise RuntimeError("CUPTI is not here")
        return found

    def prepare(self) -> dict[str, Any]:
        return self._take(
            "prepare", {"sizes": SIZES, "ours": PARTS, "agreement": {COMPILE: {"y": 0.003, "d x": 0.006}}}
        )

    def times(self) -> dict[str, Any]:
        arms = (PROGRAM, 9.5), (COMPILE, 10.1)
        return self._take("times", {"times": {f"{arm}: backward": [ms] * 12 for arm, ms in arms}})

    def kernels(self) -> dict[str, Any]:
        found = profile()
        found.pop("operators")
        return self._take("kernels", found)

    def operators(self) -> dict[str, Any]:
        return self._take("operators", {"operators": profile()["operators"]})

    def clocks(self) -> dict[str, Any]:
        at = {
            "sm_mhz": [1200, 1300.0, 1400],
            "power_w": [690, 695.0, 700],
            "throttle": ["software power cap"],
        }
        return self._take("clocks", {"sustained": {PROGRAM: {"milliseconds": [9.0], "conditions": at}}})

    def close(self) -> None:
        self.closed += 1


def measured(tmp_path: Path, seconds: float, each: float, broken: str = "") -> tuple[Fake, dict[str, Any]]:
    clock = Clock()
    fake = Fake(clock, each, broken)
    run(["1B", "7B"], fake, TimeBudget(seconds, clock), tmp_path / "found.json")
    return fake, json.loads((tmp_path / "found.json").read_text())


def test_no_stage_begins_that_the_seconds_do_not_allow(tmp_path: Path) -> None:
    fake, found = measured(tmp_path, 100.0, 14.0)
    assert fake.clock.time <= 1100.0 and found["spent"] <= 100.0 and fake.closed == 2
    assert found["widths"]["1B"]["failed"] == {}
    assert found["widths"]["7B"]["failed"] == {"prepare": "not begun: 30 s were left"}


def test_max_autotune_comes_last_and_only_with_seconds_to_spare(tmp_path: Path) -> None:
    fake, found = measured(tmp_path, 480.0, 14.0)
    assert [width for width, _ in fake.built] == ["1B", "7B", "1B"]
    assert len(fake.built[2][1]) == 3 and "1B with max-autotune" in found["widths"]
    assert len(measured(tmp_path, 340.0, 14.0)[0].built) == 2


def test_a_stage_that_fails_keeps_the_others(tmp_path: Path) -> None:
    _, found = measured(tmp_path, 300.0, 10.0, "kernels")
    assert found["widths"]["1B"]["failed"] == {"kernels": "RuntimeError: CUPTI is not here"}
    assert found["widths"]["1B"]["times"] and found["widths"]["7B"]["operators"]


def test_the_page_has_tables_and_a_chart(tmp_path: Path) -> None:
    measured(tmp_path, 180.0, 14.0)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.reading.md").write_text("Read by hand.\n")
    main(["draw", str(tmp_path / "found.json"), "--out", str(tmp_path / "docs" / "page.md")])
    page = (tmp_path / "docs" / "page.md").read_text()
    for line in (
        "Read by hand.",
        "| backward | torch.compile | 10.100 [10.100, 10.100] | 1.063 [1.063, 1.063] | 12 |",
        "d x of torch.compile differs most from LLM's: by 0.006 of its RMS.",
        "LLM takes 6632 us in the profile, and 9500 us without the profiler, from a cold L2.",
        "| attention | 1617.0 | 1564.5 | -52.5 |",
        "| dWd = dy' @ act | 0.378 | 651.0 | 661.5 | 581 | 571 |",
        "| dqkv @ Wqkv | 0.412 | 672.0 | – | 614 | – |",
        "peak at that clock is 757 TFLOP/s.",
        "![kernels of the backward, 1B, by arm](images/page_1B.svg)",
    ):
        assert line in page, line
    assert (tmp_path / "docs" / "images" / "page_1B.svg").read_text().startswith("<?xml")


def test_a_page_of_nothing_measured_says_why(tmp_path: Path) -> None:
    _, found = measured(tmp_path, 20.0, 1.0)
    paths = write(found, tmp_path / "page.md")
    assert paths == [tmp_path / "page.md"]
    assert "Not measured, prepare: not begun: 20 s were left" in paths[0].read_text()


class Launches(benches.Backward):
    """A backward that launches one kernel. The kernel takes longer in each call."""

    tape = Tape()

    def ready(self) -> None:
        self.tape.kernel("a forward's kernel", 5.0)

    def __call__(self) -> None:
        self.tape.kernel(f"kernel of {self.stream}", float(len(self.tape.events)))


def test_the_first_turns_are_dropped_and_arms_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Launches.tape = Tape()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: tape.kernel("spin_kernel(long)", 1.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def record(call: Callable[[], object], *, shapes: bool = False) -> dict[str, Any]:
        tape.events.clear()
        call()
        return tape.trace()

    monkeypatch.setattr(benches, "record", record)
    made = benches.LayerStages("1B", (PROGRAM, COMPILE))
    made.backwards = {name: Launches(cast(Any, None), name, torch.empty(0)) for name in made.names}
    found = made.kernels()["backward"]
    for name in made.names:
        (kernel,) = found[name]["kernels"]
        assert kernel["name"] == f"kernel of {name}" and found[name]["dropped"] == 0
        assert len(kernel["microseconds"]) == benches.KEPT
        # at least 3 turns are dropped first, each with 2 arms and 4 events per arm
        assert kernel["microseconds"][0] > 3 * 2 * 4
    assert [row[0]["name"] for row in made.operators()["operators"].values()] == [
        f"kernel of {name}" for name in made.names
    ]
