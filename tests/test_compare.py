"""A comparison's course: what is measured, what is kept, what is stale, and what a broken column stops.

The workers are stood in for, and give figures; tests/gpu has real ones.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comparison import results as made_up

from agent import cli
from agent.compare import environment, kernels, measuring, rows
from agent.compare.cells import Cell, Empty, lines
from agent.compare.measuring import Asked, measure
from agent.compare.results import LAYER_FORWARD, Results, ResultsError, read, write
from primitives.ir import Schedule
from verifier import contest as contests
from verifier import timing
from verifier.columns import (
    ANCHOR,
    COMPILE,
    EAGER,
    FLASHINFER,
    HUMAN,
    LIGER,
    LLM,
    MATMUL,
    PROGRAM,
    TORCH,
    UPSTREAM,
)
from verifier.contest import Entrant, Stage, machine
from verifier.gpu import Lost, cuda_error
from verifier.quack_baseline import OWN_TUNER

H100 = {"tensor": 8e14, "tensor_fp8": 1.6e15, "memory": 3e12}
ARMS = (EAGER, COMPILE, LIGER, OWN_TUNER, UPSTREAM, PROGRAM, ANCHOR)
SPEEDS = {EAGER: 2.0, COMPILE: 1.5, LIGER: 1.8, OWN_TUNER: 1.1, PROGRAM: 1.0, ANCHOR: 0.9, UPSTREAM: 1.2}


class Machine:
    """Stands in for ``verifier.gpu.Worker``: keeps who sat, by interpreter."""

    def __init__(self) -> None:
        self.sat: list[tuple[str | None, tuple[str, ...]]] = []
        self.deadly: set[str] = set()
        self.broken: dict[str, str] = {}
        self.interrupted_at = -1
        self.open = 0

    def __call__(self, python: str | None = None) -> Any:
        self.open += 1
        return SimpleNamespace(ask=lambda *given, **more: self.ask(python, *given, **more), close=self.close)

    def close(self) -> None:
        self.open -= 1

    def ask(self, python: str | None, task: Any, asked: Any, *, progress: Any = None, **_: Any) -> Any:
        if task is machine:
            return {"gpu": "a GPU", "ceilings": H100}
        if len(self.sat) == self.interrupted_at:
            raise KeyboardInterrupt
        self.sat.append((python, asked.arms))
        for arm in asked.arms:
            progress("compare", arm)
            if arm in self.deadly:
                raise Lost("crashed", f"{arm} wrote astray")
        left = [arm for arm in asked.arms if arm not in self.broken]
        scale = 1 + 0.001 * len(self.sat)
        told = {
            arm: {"milliseconds": [SPEEDS.get(arm, 3.0) * scale] * 12, "losses": {}, "bytes": 1 << 20}
            for arm in left
        }
        failed = {arm: why for arm, why in self.broken.items() if arm in asked.arms}
        return {"arms": told, "failed": failed, "conditions": {"gpu": "a GPU"}}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    monkeypatch.setattr(measuring, "Worker", found)
    monkeypatch.setattr(environment, "python", lambda: "/other/python")
    monkeypatch.setattr(environment, "versions", lambda python, packages: dict.fromkeys(packages, "0.2"))
    monkeypatch.setattr(measuring, "version", lambda name: "1.0" if name != "liger-kernel" else "0.8.5")
    yield found
    assert found.open == 0  # whatever happened


def asked(*names: str, processes: int = 1, arms: tuple[str, ...] = ARMS) -> Asked:
    chosen = rows.chosen(names or ("gemm_swiglu",), ("1B",), everything=False, quick=False)
    return Asked(tuple(chosen), arms, processes, 12)


def never(made: Results) -> None:
    raise AssertionError("nothing was to be measured")


def cells(results: Results) -> dict[str, Cell | Empty]:
    (line,) = lines(results)
    return dict(line.cells)


def test_what_is_there_is_not_measured_again(gpu: Machine, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = measure(asked(processes=2), Results(), lambda made: write(path, made))
    assert first == read(path) and len(first.sittings) == 4
    ours = (ANCHOR, EAGER, COMPILE, LIGER, OWN_TUNER, PROGRAM)
    assert gpu.sat == [(None, ours), ("/other/python", (ANCHOR, UPSTREAM))] * 2
    gpu.sat.clear()
    assert measure(asked(processes=2), read(path), never) == first and not gpu.sat
    more = measure(asked(processes=3), read(path), lambda made: None)
    assert len(gpu.sat) == 2 and {s.process for s in more.sittings} == {0, 1, 2}


def test_columns_of_two_environments_are_compared_through_the_anchor(gpu: Machine) -> None:
    found = cells(measure(asked(processes=2), Results(), lambda made: None))
    human, upstream, own = (found[name] for name in (HUMAN, "upstream CODA", LLM))
    assert isinstance(human, Cell) and isinstance(upstream, Cell) and isinstance(own, Cell)
    assert human.against and human.against.estimate == pytest.approx(1.1) and not human.anchored
    assert upstream.against and upstream.against.estimate == pytest.approx(1.2) and upstream.anchored
    assert own.against is None and own.processes == 2


def test_a_sitting_tells_the_versions_that_sat_in_it(gpu: Machine) -> None:
    here, there = measure(asked(), Results(), lambda made: None).sittings
    assert here.conditions["versions"]["liger-kernel"] == "0.8.5"
    assert "liger-kernel" not in there.conditions["versions"]
    assert there.conditions["versions"]["coda-kernels"] == "0.2"


def test_a_changed_kernel_makes_its_own_cells_stale(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(asked(), Results(), lambda made: None)
    gpu.sat.clear()
    usual = kernels.contenders

    def other(*given: Any) -> Any:
        return {
            arm: replace(found, schedules={0: Schedule(128, 256, False)})
            for arm, found in usual(*given).items()
        }

    monkeypatch.setattr(kernels, "contenders", other)
    again = measure(asked(), first, lambda made: None)
    assert gpu.sat == [(None, (ANCHOR, PROGRAM))]
    found = cells(again)[HUMAN]
    assert isinstance(found, Cell) and found.anchored  # it never sat with the new kernel


def test_another_version_of_a_library_is_another_column(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure(asked(), Results(), lambda made: None)
    gpu.sat.clear()
    monkeypatch.setattr(measuring, "version", lambda name: "0.9" if name == "liger-kernel" else "1.0")
    measure(asked(), first, lambda made: None)
    assert gpu.sat == [(None, (ANCHOR, LIGER))]


def test_a_broken_column_says_so_and_stops_nothing(gpu: Machine) -> None:
    gpu.broken = {LIGER: "ValueError: no such width"}
    found = measure(asked("gemm_swiglu", "gemm_rope", processes=2), Results(), lambda made: None)
    assert [line.cells[LIGER] for line in lines(found)] == [Empty(f"{LIGER}: ValueError: no such width")] * 2
    assert all(isinstance(line.cells[HUMAN], Cell) for line in lines(found))
    assert sum(LIGER in arms for _, arms in gpu.sat) == 2  # once a row, not in every process
    gpu.broken = {}
    mended = measure(asked("gemm_swiglu", "gemm_rope", processes=2), found, lambda made: None)
    assert all(isinstance(line.cells[LIGER], Cell) for line in lines(mended))


def test_a_column_that_takes_the_worker_along_is_left_out(gpu: Machine) -> None:
    gpu.deadly = {OWN_TUNER, LIGER}
    found = cells(measure(asked(), Results(), lambda made: None))
    assert found[HUMAN] == Empty(f"{OWN_TUNER}: crashed: {OWN_TUNER} wrote astray")
    assert found[LIGER] == Empty(f"{LIGER}: crashed: {LIGER} wrote astray")
    assert isinstance(found[LLM], Cell) and isinstance(found[TORCH], Cell)


def test_a_gpu_on_which_the_anchor_dies_measures_nothing(gpu: Machine) -> None:
    gpu.deadly = {ANCHOR}
    with pytest.raises(Lost, match="cuBLAS matmul wrote astray"):
        measure(asked(), Results(), never)


def test_an_interrupted_comparison_goes_on(gpu: Machine, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    gpu.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt):
        measure(asked(processes=2), Results(), lambda made: write(path, made))
    assert len(read(path).sittings) == 3
    gpu.interrupted_at = -1
    whole = measure(asked(processes=2), read(path), lambda made: write(path, made))
    assert len(gpu.sat) == 4 and [s.process for s in whole.sittings] == [0, 0, 1, 1]


def test_what_cannot_be_tried_has_its_reason(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "flashinfer-python":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(measuring, "version", missing)
    monkeypatch.setattr(environment, "python", lambda: None)
    monkeypatch.setattr(kernels, "contenders", lambda *given: {})
    found = cells(measure(asked(arms=(*ARMS, FLASHINFER)), Results(), lambda made: None))
    assert found[FLASHINFER] == Empty("flashinfer-python is not installed: pip install flashinfer-python")
    assert found[UPSTREAM] == Empty("it has no environment of its own: coda-agent compare --install")
    assert found[LLM] == Empty("no accepted kernel")
    human = found[HUMAN]
    assert isinstance(human, Cell) and human.against is None


def test_a_layer_is_a_row_too(gpu: Machine) -> None:
    found = measure(asked(LAYER_FORWARD), Results(), lambda made: None)
    ((_, arms),) = gpu.sat
    assert arms == (EAGER, COMPILE, LIGER, PROGRAM)
    (line,) = lines(found)
    assert line.operator == LAYER_FORWARD and line.cells[MATMUL] == Empty("no layer of it")
    flops = 2 * 16384 * 2048 * (4 * 2048 + 3 * 5632) + 2 * 8 * 2048**2 * 2048
    assert line.roofline == pytest.approx(flops / H100["tensor"] * 1e3, rel=1e-5)


def test_the_usual_rows() -> None:
    usual = rows.chosen((), (), everything=False, quick=False)
    assert len([row for row in usual if row.case.startswith("square")]) == 9
    assert len([row for row in usual if row.case in ("1B", "7B", "70B")]) == 36  # with layers
    for row in usual:
        if row.case.startswith("square"):
            n = int(row.case.split()[1])
            assert isinstance(row, rows.OperatorRow)
            assert kernels.written(row.spec).types() and row.least(H100) >= 2 * n**3 / H100["tensor"]
    assert len(rows.chosen((), (), everything=False, quick=True)) == 3
    everything = rows.chosen((), (), everything=True, quick=False)
    assert len({row.operator for row in everything}) == 32
    with pytest.raises(ResultsError, match="there is no gemm_nothing"):
        rows.chosen(("gemm_nothing",), (), everything=False, quick=False)
    with pytest.raises(ResultsError, match="these operators have the cases 1B, 7B"):
        rows.chosen(("gemm_rope",), ("2B",), everything=False, quick=False)


def test_a_kernel_comes_as_it_was_tuned_or_with_what_was_good_nearby() -> None:
    swiglu = next(r for r in rows.chosen(("gemm_swiglu",), (), everything=False, quick=False))
    assert isinstance(swiglu, rows.OperatorRow)
    kept = kernels.tuned(swiglu.spec, raw=False)
    assert kept
    at_7b = swiglu.spec.case("7B").sizes
    assert kernels.contenders(swiglu.spec, at_7b)[PROGRAM].schedules == kept.schedules["7B"]
    elsewhere = kernels.contenders(swiglu.spec, rows.square("gemm_swiglu", 8192))[PROGRAM]
    assert elsewhere.schedules is None and elsewhere.known in kept.finalists.values()


# On a stage


class Toy(Stage):
    """Arms that leave a known trace; some fail."""

    turns = 2

    def __init__(self) -> None:
        self.called: list[str] = []
        self.knows = True

    def enter(self, arm: str) -> Entrant:
        assert self.knows
        if arm == "refuses":
            raise ValueError("no such width\nand more")
        return Entrant(lambda: self.called.append(arm), {"y": {"relative": 0.1, "yardsticks": 1.0}})

    def again(self, arm: str, turn: int) -> Callable[[], object]:
        if arm == "fails later":
            return lambda: 1 / 0
        return lambda: self.called.append(f"{arm} {turn}")

    def forget_truth(self) -> None:
        self.knows = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage asks of CUDA, and a clock on which everything takes a millisecond."""
    sizes = itertools.count(1000, 100)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: next(sizes))
    usual = timing.measure

    def measured(arms: Any, **given: Any) -> Any:
        return usual(arms, **{**given, "warmup_seconds": 0.0}, clock=Clock())

    monkeypatch.setattr(timing, "measure", measured)


class Clock:
    """Stands in for CUDA's events."""

    def __init__(self) -> None:
        self.begun = 0
        self.before: tuple[float, ...] = ()

    def now(self) -> float:
        return 0.0

    def flush(self) -> None:
        pass

    def start(self) -> int:
        self.begun += 1
        return self.begun - 1

    def stop(self, mark: int) -> None:
        pass

    def turn(self) -> tuple[float, ...]:
        ended, self.before, self.begun = self.before, (1e-3,) * self.begun, 0
        return ended

    def drain(self) -> tuple[float, ...]:
        ended, self.before = self.before, ()
        return ended


@pytest.mark.usefixtures("device")
def test_a_stage_seats_who_can_and_says_why_others_cannot() -> None:
    stage = Toy()
    found = contests.contest(stage, ("one", "refuses", "fails later", "two"), "one", 12)
    assert found["failed"] == {
        "refuses": "ValueError: no such width",
        "fails later": "ZeroDivisionError: division by zero",
    }
    assert list(found["arms"]) == ["one", "two"] and not stage.knows
    assert found["arms"]["one"] == {
        "losses": {"y": {"relative": 0.1, "yardsticks": 1.0}},
        "bytes": 100,
        "milliseconds": [1.0] * 12,
    }
    assert stage.called.count("two 1") > 6 < stage.called.count("two")  # both sets of inputs had their turns


@pytest.mark.usefixtures("device")
def test_without_its_anchor_there_is_no_contest() -> None:
    with pytest.raises(RuntimeError, match="refuses did not run: ValueError: no such width"):
        contests.contest(Toy(), ("one", "refuses"), "refuses", 12)


@pytest.mark.usefixtures("device")
def test_an_error_of_the_device_is_no_arms_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "CUDA error: an illegal memory access was encountered"
    assert cuda_error(words) and not cuda_error("CUDA out of memory")

    def enter(self: Toy, arm: str) -> Entrant:
        raise RuntimeError(words)

    monkeypatch.setattr(Toy, "enter", enter)
    with pytest.raises(RuntimeError, match="illegal memory"):
        contests.contest(Toy(), ("one", "two"), "one", 12)


# The command


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coda-agent", "compare", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_results_are_drawn_without_a_gpu(command: Callable[..., Any], tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    write(kept, made_up((("gemm_rope", "7B"), ("gemm_swiglu", "7B"))))
    status, said, _ = command("--from", kept, "--out", tmp_path / "drawn")
    assert status == 0 and "Against human" in said
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert {"table.md", "comparison.html", "speedup.svg", "speedup.png", "roofline.png"} <= drawn
    status, said, _ = command("--from", kept, "--out", tmp_path / "drawn", "--json")
    found = json.loads(said)["rows"]
    assert status == 0 and [row["operator"] for row in found] == ["gemm_rope", "gemm_swiglu"]


def test_measuring_needs_an_h100(command: Callable[..., Any], tmp_path: Path) -> None:
    status, _, said = command("--out", tmp_path)
    assert status == cli.ABSENT and "takes an H100" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--columns", "nobody"), "there is no column 'nobody'"),
        (("--only", "gemm_nothing"), "there is no gemm_nothing"),
    ],
)
def test_a_wrong_choice_is_wrong_usage(
    command: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    status, _, said = command("--out", tmp_path, *words)
    assert status == cli.USAGE and told in said


def test_a_file_that_is_none_is_wrong_usage(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"sittings": [{"operator": 3}]}')
    status, _, said = command("--from", tmp_path / "results.json", "--out", tmp_path)
    assert status == cli.USAGE and "sittings.0.operator" in said


def test_the_command_measures_keeps_and_draws(
    gpu: Machine, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.session.use_gpu", lambda wanted: True)
    words = ("--out", tmp_path, "--only", "gemm_swiglu", "--cases", "1B", "--quick", "--columns", "tor")
    status, said, told = command(*words)
    assert status == 0 and "gemm_swiglu 1B, process 1: torch.compile" in told, told
    assert gpu.sat[0][1][:3] == (ANCHOR, EAGER, COMPILE) and LIGER not in gpu.sat[0][1]
    assert "Against torch.compile: no row has both" in said
    assert read(tmp_path / "results.json").sittings
