"""Tests of a session that measures the arms of one operator: inputs, truth, losses, a cold L2, and the keys
of kernels.

PyTorch on a CPU stands in for the GPU and its kernels. Specs, inputs, truth and losses are real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkout import ROOT
from comparison_machine import stood_in
from simulated_clock import SimulatedClock
from torch import Tensor

import coda_agent.verifier.numerics.inputs
from coda_agent.comparison import kernels, rows, session
from coda_agent.comparison.competitors import EAGER, EDITED, LIGER, PROGRAM, REFERENCE_ARM
from coda_agent.comparison.keys import text
from coda_agent.comparison.measuring import ComparisonRequest, measure
from coda_agent.comparison.results import Results
from coda_agent.comparison.session import OperatorArms, _Operator, measure_operator
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.compiler.lower import editable
from coda_agent.primitives.lang.interpret import interpret
from coda_agent.primitives.lang.ir import Program
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.primitives.runtime import tune
from coda_agent.primitives.runtime.launch import Kernel
from coda_agent.primitives.system.files import write_atomic
from coda_agent.verifier import timing
from coda_agent.verifier.baselines import quack
from coda_agent.verifier.baselines.quack import LIBRARY_ARMS, OUR_SEARCH, OWN_TUNER
from coda_agent.verifier.gpu import benchmark
from coda_agent.verifier.loading import load
from coda_agent.verifier.numerics import reference
from coda_agent.verifier.report import QuackTuned

SPECS = ROOT / "specs"
SIZES = {
    "gemm_swiglu": {"M": 24, "D": 32, "F": 16},
    "gemm_residual_partial_rmsnorm": {"M": 24, "K": 40, "N": 32},
    "gemm_grad_accumulate": {"M": 48, "N": 16, "K": 24},
}
Tensors = Mapping[str, Tensor]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def as_it_is(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return outputs


@dataclass
class Interpreted:
    """Stands in for a model's kernel and for the kernel's plan. It interprets the program, and ``change``
    modifies the outputs. ``seen`` has the inputs of each call."""

    program: Program
    change: Change = as_it_is
    seen: list[Tensors] = field(default_factory=list)

    def plan(self, inputs: Tensors, sizes: Mapping[str, int]) -> Interpreted:
        return self

    def in_place(self, inputs: Tensors) -> dict[str, Tensor]:
        fresh = {name: torch.full_like(t, torch.nan) for name, t in interpret(self.program, inputs).items()}
        return fresh | {name: inputs[own] for name, own in self.program.signature.updates.items()}

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        self.seen.append({name: t.clone() for name, t in inputs.items()})
        for name, answer in self.change(interpret(self.program, inputs)).items():
            outputs[name].copy_(answer)


@pytest.fixture(autouse=True)
def l2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return fake properties of a GPU. The L2 cache has no bytes, unless a test sets another size."""
    found = SimpleNamespace(L2_cache_size=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    on_gpu = coda_agent.verifier.numerics.inputs.draw
    monkeypatch.setattr("coda_agent.verifier.numerics.inputs.draw", lambda *given, device: on_gpu(*given))
    yield found


class Clock(SimulatedClock):
    """A simulated clock on which every call takes at least 0.02 seconds."""

    def stop(self, mark: int) -> None:
        self.time += 0.02
        super().stop(mark)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    """Replace the GPU's events by a simulated clock, and replace the other CUDA functions that a session
    calls. Return the clock."""
    found = Clock()
    monkeypatch.setattr(timing, "CudaClock", lambda: found)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return found


def seats(name: str, *arms: str, change: Change = as_it_is) -> tuple[OperatorArms, Interpreted]:
    spec = load(SPECS / f"{name}.yaml", check=False)
    kernel = Interpreted(kernels.written(spec), change)
    return OperatorArms(spec, SIZES[name], arms, {PROGRAM: cast(Kernel, kernel)}, 12), kernel


# Inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("holds", "wanted"), [(0.0, 2), (1.9, 2), (2.1, 3), (100.0, benchmark.MOST_SETS)])
def test_arms_take_turns_with_two_sets_of_inputs_or_with_what_no_l2_holds(
    l2: Any, holds: float, wanted: int
) -> None:
    asked, _ = seats("gemm_swiglu")
    set_bytes = 2 * (24 * 32 + 32 * 32)
    l2.L2_cache_size = int(holds * set_bytes)
    stage = _Operator(asked)
    assert stage.turns == len(stage.sets) == wanted
    assert sum(t.numel() * t.itemsize for t in stage.sets[0].values()) == set_bytes
    first = [inputs["x"] for inputs in stage.sets]
    assert not any(torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])


@pytest.mark.usefixtures("clock")
def test_every_arm_is_timed_on_all_sets_in_turn() -> None:
    asked, kernel = seats("gemm_swiglu", REFERENCE_ARM, PROGRAM)
    measure_operator(asked)
    sums = [float(inputs["x"].float().sum()) for inputs in kernel.seen]
    assert len(set(sums)) == 2
    timed = sums[-12:]
    assert timed == timed[:2] * 6 and timed[0] != timed[1]


@pytest.mark.parametrize("name", SIZES)
def test_every_arm_of_every_turn_gives_what_is_true_of_its_inputs(name: str) -> None:
    """A kernel may update an input in place, so each arm gets its own copy of such an input. Without copies,
    the input would hold the sum of all arms' calls."""
    asked, _ = seats(name)
    stage = _Operator(asked)
    before = [{n: t.clone() for n, t in inputs.items()} for inputs in stage.sets]
    for arm in (EAGER, PROGRAM, EAGER):
        entrant = stage.enter(arm)
        entrant.call()
        assert entrant.losses.keys() == asked.spec.outputs.keys()
        for found in entrant.losses.values():
            # in one of 150 draws, each of 384 values, eager PyTorch's error was 0.006
            assert found["relative"] < 0.01
            # eager PyTorch's error is larger, because eager PyTorch also rounds intermediates
            assert arm == EAGER or found["yardsticks"] < 1.5
        stage.again(arm, 1)()
    for inputs, drawn in zip(stage.sets, before, strict=True):
        assert all(torch.equal(inputs[n], t) for n, t in drawn.items())
    again = cast(dict[str, Tensor], stage.again(EAGER, 1)())
    truth = reference.oracle(asked.spec, before[1], asked.sizes)
    for n, t in again.items():
        assert (t.double() - truth[n]).norm() < 0.01 * truth[n].norm()


# Losses -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_an_arm_tells_how_far_each_output_is_from_the_truth() -> None:
    """The test computes both figures of an output by hand. "relative" is the error's RMS divided by the
    truth's RMS. "yardsticks" is the error's RMS divided by the RMS of the yardstick's error."""

    def off(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return outputs | {"act": outputs["act"] * 1.09}

    asked, kernel = seats("gemm_swiglu", REFERENCE_ARM, EAGER, PROGRAM, change=off)
    found = measure_operator(asked)["arms"]
    assert set(found) == {REFERENCE_ARM, EAGER, PROGRAM} and found[REFERENCE_ARM]["losses"] == {}
    assert found[EAGER]["losses"].keys() == found[PROGRAM]["losses"].keys() == {"preact", "act"}
    inputs = kernel.seen[0]
    exact = reference.oracle(asked.spec, inputs, asked.sizes)
    usual = reference.yardstick(asked.spec, inputs, asked.sizes)
    for n, answer in off(interpret(kernel.program, inputs)).items():
        error = (answer.double() - exact[n]).norm()
        by_hand = {
            "relative": float(error / exact[n].norm()),
            "yardsticks": float(error / (usual[n].double() - exact[n]).norm()),
        }
        assert found[PROGRAM]["losses"][n] == pytest.approx(by_hand, rel=1e-4)
    told = found[PROGRAM]["losses"]
    assert told["act"]["relative"] == pytest.approx(0.09, abs=0.01) and told["act"]["yardsticks"] > 20
    assert told["preact"]["relative"] < 0.01 and found[EAGER]["losses"]["act"]["relative"] < 0.01


def beyond(outputs: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    outputs["act"][-1, 3:] = value
    return outputs


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite_is_no_perfect_one(value: float) -> None:
    """Every arm with a NaN or infinite output fails. In this test, a model's kernel leaves a part of one row
    unwritten."""
    found = measure_operator(
        seats("gemm_swiglu", REFERENCE_ARM, EAGER, PROGRAM, change=lambda o: beyond(o, value))[0]
    )
    assert set(found["arms"]) == {REFERENCE_ARM, EAGER}
    why = "output 'act' is NaN or infinite where the truth is not, or the other way round"
    assert found["failed"] == {PROGRAM: why}


@pytest.mark.usefixtures("clock")
def test_an_output_of_another_computation_fails_and_says_how_far_off_it_is() -> None:
    def swapped(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return outputs | {"preact": outputs["preact"].flip(1)}

    found = measure_operator(seats("gemm_swiglu", REFERENCE_ARM, PROGRAM, change=swapped)[0])
    assert set(found["arms"]) == {REFERENCE_ARM}
    said = r"output 'preact' is off by 1\.\d+ of the truth's RMS \(limit 0\.1\)"
    assert re.fullmatch(said, found["failed"][PROGRAM])


def test_the_truth_of_few_bits_is_kept_in_fp32_and_let_go_of() -> None:
    stage = _Operator(seats("gemm_residual_partial_rmsnorm")[0])
    kept = {name: t.dtype for name, t in stage.truth.items()}
    assert kept == {"h": torch.float32, "hg": torch.float32, "rstd": torch.float64}
    stage.forget_truth()
    assert not stage.truth and not stage.yardstick


# The clock ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cold", [True, False])
def test_what_is_timed_finds_a_cold_l2_where_it_is_asked_for(clock: SimulatedClock, cold: bool) -> None:
    arms = [clock.work(name, lambda: 0.0) for name in "ab"]
    samples, _ = benchmark.timed(arms, 12, cold=cold)
    assert {name: len(found.seconds) for name, found in samples.items()} == {"a": 12, "b": 12}
    starts = [i for i, word in enumerate(clock.log) if word == "start"]
    assert len(starts) > 24
    assert [clock.log[i - 1] == "flush" for i in starts] == [cold] * len(starts)


def test_a_session_is_timed_cold(clock: SimulatedClock) -> None:
    measure_operator(seats("gemm_swiglu", REFERENCE_ARM, PROGRAM)[0])
    assert clock.log.count("flush") == clock.log.count("start") > 24


# Tuning ahead of the session ----------------------------------------------------------------------


def test_only_arms_that_nothing_is_known_of_are_tuned_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An arm whose schedules are already known at these sizes is not tuned. They may be known from a report,
    or from the cache on disk."""
    spec, base, sizes = load(SPECS / "gemm_swiglu.yaml", check=False), accepted(), SIZES["gemm_swiglu"]
    monkeypatch.setenv("CODA_AGENT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(quack, "_here", lambda: ["a GPU", "1"])
    asked = list[tuple[str, ...]]()
    monkeypatch.setattr(session, "prepare", lambda arm, seats, inputs: asked.append((arm, *inputs)))

    def tuned(seats: OperatorArms) -> list[str]:
        asked.clear()
        for each in seats.tunes():
            each()
        assert all(names == [*spec.inputs] for _, *names in asked)
        return [arm for arm, *_ in asked]

    def kept(kernel: Kernel, schedule: Schedule) -> None:
        place = tune.cache_path(kernel.source, sizes)
        write_atomic(place, json.dumps({"schedules": {"0": schedule.to_json()}}))

    both = {PROGRAM: base, EDITED: edited(base, known={0: [ONE]})}
    new = OperatorArms(spec, sizes, (REFERENCE_ARM, PROGRAM, EDITED, LIGER, *LIBRARY_ARMS), both, 12)
    assert tuned(new) == [PROGRAM, EDITED, *LIBRARY_ARMS]
    kept(both[PROGRAM], OTHER)
    # this schedule does not count, because the edited text was not checked on it
    kept(both[EDITED], OTHER)
    there = quack._stages(
        spec, coda_agent.verifier.numerics.inputs.draw(spec, sizes, 0, device="cuda"), sizes, ""
    )
    write_atomic(quack._cache_path(spec, sizes, OUR_SEARCH, there), "[]")
    assert tuned(new) == [EDITED, OWN_TUNER]
    kept(both[EDITED], ONE)
    raced = asdict(quack.config(128, 128, True))
    told = QuackTuned(gpu="a GPU", version="1", arms={OWN_TUNER: ((raced,),)})
    assert tuned(replace(new, quack=told.model_copy(update={"gpu": "another"}))) == [OWN_TUNER]
    assert tuned(replace(new, quack=told)) == []
    own = KernelSource(base.program._replace(schedule={0: ONE}))
    for fixed in (base.source.on({0: ONE}), own):
        assert Kernel(fixed).is_tuned({"M": 7, "D": 7, "F": 7})


# The key of an arm --------------------------------------------------------------------------------

ONE, OTHER = Schedule(128, 256, False), Schedule(128, 128, True)


def accepted(name: str = "gemm_swiglu", schedules: Mapping[int, Schedule] | None = None) -> Kernel:
    program = kernels.written(load(SPECS / f"{name}.yaml", check=False))
    return Kernel(KernelSource(program, schedules or {}))


def edited(kernel: Kernel, end: str = "", **known: Any) -> Kernel:
    return Kernel(replace(kernel.source, edited=editable(kernel.program) + end), **known)


def test_a_kernel_is_known_by_its_text_and_its_schedules() -> None:
    base = accepted(schedules={0: ONE})
    untuned = base.source.on({})
    different = [
        base,
        accepted(schedules={0: OTHER}),
        accepted("gemm_rope", schedules={0: ONE}),
        edited(base),
        edited(base, "\n# another text\n"),
        Kernel(untuned),
        Kernel(untuned, known={0: [ONE]}),
        Kernel(untuned, known={0: [ONE, OTHER]}),
    ]
    known = [text(each) for each in different]
    assert len(set(known)) == len(known)
    assert text(accepted(schedules={0: ONE})) == known[0]


def test_a_kernels_changed_text_makes_its_own_cells_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the text of the kernel changes; its schedules stay the same."""
    chosen = rows.choose_rows(("gemm_swiglu",), ("1B",), everything=False, quick=False)
    usual = kernels.by_arm

    def changed(*given: Any) -> dict[str, Kernel]:
        found = usual(*given)
        return {arm: edited(kernel) for arm, kernel in found.items()}

    with stood_in(monkeypatch) as gpu:
        asked = ComparisonRequest(tuple(chosen), (EAGER, PROGRAM), 1, 12)
        first = measure(asked, Results(), lambda made: None)
        monkeypatch.setattr(kernels, "by_arm", changed)
        other = rows.choose_rows(("gemm_swiglu",), ("1B",), everything=False, quick=False)
        measure(replace(asked, rows=tuple(other)), first, lambda made: None)
        assert [arms for _, arms in gpu.sat] == [(REFERENCE_ARM, PROGRAM, EAGER), (REFERENCE_ARM, PROGRAM)]
