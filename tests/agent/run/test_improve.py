"""Improvement rounds: the text that the author sees, the schedules that the author may set, and the kernel
that is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authoring import (
    HEADER,
    TOY_KERNEL,
    Notes,
    Scripted,
    fenced,
    make_run,
    measured,
    program_of,
    timing,
    write_toy,
)

from coda_agent.agent.artifacts import bundle, bundle_measuring
from coda_agent.agent.artifacts.accept import accept
from coda_agent.agent.run import assembly, history, improve, runs
from coda_agent.agent.run.loop import Loop, Outcome, result_of
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.primitives.errors import InvalidInput
from coda_agent.primitives.lang.errors import ProgramError
from coda_agent.primitives.lang.schedule import Schedule
from coda_agent.verifier.audit.provenance import problems
from coda_agent.verifier.decision import BASELINE, KEPT, compared, decide
from coda_agent.verifier.gates import Failed
from coda_agent.verifier.incumbent import Incumbent
from coda_agent.verifier.loading import load
from coda_agent.verifier.measure import MeasureOptions
from coda_agent.verifier.report import Accepted, Checked, Measured, Rejected
from coda_agent.verifier.spec.model import Spec

GOOD = fenced(TOY_KERNEL)


def scheduled(swizzle: int) -> str:
    return f'{GOOD}\n```json\n{{"0": {{"swizzle": {swizzle}}}}}\n```\n'


@pytest.fixture
def toy(runs_home: Path, tmp_path: Path, no_compiler: None) -> Path:
    return write_toy(tmp_path)


class Gpu:
    """A fake for the GPU gates. ``faster`` has one entry for each change: True if the change is faster.
    ``kernels`` records each measured kernel. ``kept`` records the kernel that each measured kernel had to
    beat, or None."""

    def __init__(self, *faster: bool):
        self.faster = list(faster)
        self.kept: list[Incumbent | None] = []
        self.kernels: list[KernelSource] = []

    def __call__(
        self, spec: Spec, kernel: KernelSource, keep: object, kept: Incumbent | None
    ) -> Measured | Rejected:
        self.kept.append(kept)
        self.kernels.append(kernel)
        if kept and not self.faster.pop(0):
            return Rejected(gate="decision", code="no_faster", message="no case is faster beyond doubt")
        return measured(spec, kernel.program)


def author(
    run: runs.Run, answers: list[str], gpu: Gpu | None, rounds: int
) -> tuple[Outcome, Scripted, Notes]:
    provider, notes = Scripted(answers), Notes()
    loop = Loop(run.journal, run.spec, assembly.task_of(run), provider, notes, measure=gpu, improve=rounds)
    return loop.run(), provider, notes


def test_what_beats_the_kept_kernel_is_kept(toy: Path) -> None:
    run, gpu = runs.start(toy, HEADER | {"provider": "handoff"}), Gpu(True, False)
    with run.journal:
        outcome, provider, notes = author(run, ["none", GOOD, scheduled(16), scheduled(32)], gpu, 2)
        assert isinstance(outcome.report, Accepted) and outcome.authorship.attempts == 3
        assert outcome.kernel is not None and outcome.kernel.program.schedule == {0: Schedule(swizzle=16)}
        assert result_of(run.journal, run.spec) == outcome and outcome.usage.input_tokens == 4 * 100
        assert notes.attempts == [1, 2, 3, 4]
        assert notes.reports == ["rejected", "accepted", "accepted", "rejected"]
    first, second, third = gpu.kept
    assert first is None and second is not None and third is not None
    assert (second.kernel, third.kernel) == tuple(gpu.kernels[:2])
    assert second.schedules["large"] == {0: Schedule(256, 128, False)}
    assert [len(k.program.schedule) for k in gpu.kernels] == [0, 1, 1]
    (found,) = history.past()
    assert (found.status, found.attempts) == ("accepted", 4)


def test_the_author_is_shown_where_the_time_goes(toy: Path) -> None:
    run = runs.start(toy, HEADER)
    with run.journal:
        _, provider, _ = author(run, [GOOD, scheduled(16)], Gpu(False), 1)
    (_, messages) = provider.asked[1]
    told = messages[-1].text
    assert "1 round(s) are left" in told
    assert (
        "- large (M = 4096, K = 4096, N = 4096): 2.0000 ms, 7% of the roofline; 1.300x torch.compile" in told
    )
    assert "tuned to step 0: tile_m 256, tile_n 128, pingpong False" in told
    assert "Shares are of the whole bound" in told and "not of the measured time" in told
    assert "gemm of step 0: 100% of the bound, bound by compute" in told and "137.4 GFLOP" in told
    assert "168 registers, 0 loads and 0 stores spilled, 16 HGMMA" in told
    assert told.endswith(improve.HOW.strip())


def test_the_author_is_shown_what_each_part_takes(toy: Path) -> None:
    (case, *_) = load(toy, check=False).cases
    alone = improve.case_words(timing(case))
    assert "its parts" not in alone
    both = timing(case).model_copy(update={"parts": {"gemm of step 0": 1.9, "vector of step 0": 0.1}})
    told = improve.case_words(both)
    assert (
        "its parts, each by itself: gemm of step 0 1.9000 ms (95%), vector of step 0 0.1000 ms (5%)" in told
    )


def test_a_change_that_is_wrong_is_fed_back_and_the_kernel_stays(toy: Path) -> None:
    run = runs.start(toy, HEADER)
    bad = GOOD + '\n```json\n{"0": {"swizzle": 5}}\n```\n'
    with run.journal:
        outcome, provider, _ = author(run, [GOOD, bad, scheduled(16)], Gpu(True), 2)
    assert isinstance(outcome.report, Accepted) and outcome.authorship.attempts == 3
    assert "reason `schedule`" in provider.asked[2][1][-1].text


def test_no_rounds_end_at_the_first_acceptance(toy: Path) -> None:
    run = runs.start(toy, HEADER)
    with run.journal:
        outcome, provider, _ = author(run, [GOOD], Gpu(), 0)
    assert isinstance(outcome.report, Accepted) and len(provider.asked) == 1


def test_a_schedule_before_the_first_acceptance_is_not_looked_at(toy: Path) -> None:
    run = runs.start(toy, HEADER)
    with run.journal:
        outcome, _, _ = author(run, [scheduled(5)], Gpu(), 0)
    assert outcome.kernel is not None and outcome.kernel.program.schedule == {}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("[1]", "not an object of objects"),
        ('{"0": 3}', "not an object of objects"),
        ('{"a": {}}', "invalid literal"),
        ('{"0": {"tile": 1}}', "schedule field 'tile'"),
        ('{"0": {"swizzle": 5}}', "swizzle one of"),
        ("{", "must map steps to a schedule's fields"),
        ("[" * 100_000, "must map steps to a schedule's fields"),
    ],
)
def test_schedules_that_are_none(block: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        improve.schedules(f"```json\n{block}\n```")


@pytest.mark.parametrize("step", ["1", "-1"])
def test_a_schedule_for_a_step_that_is_not_there(toy: Path, step: str) -> None:
    run = runs.start(toy, HEADER)
    answer = f'{GOOD}\n```json\n{{"{step}": {{}}}}\n```\n'
    with run.journal:
        _, _, notes = author(run, [GOOD, answer], Gpu(), 1)
        events = {e.key: e.payload for e in run.journal.events()}
    assert notes.reports == ["accepted", "rejected"]
    assert events["report/2"]["report"]["code"] == "schedule"


def test_a_kernel_with_schedules_can_be_accepted_and_stands(toy: Path, tmp_path: Path) -> None:
    run = runs.start(toy, HEADER)
    with run.journal:
        outcome, _, _ = author(run, [GOOD, scheduled(16)], Gpu(True), 1)
        accept(outcome, run.journal, tmp_path, tmp_path)
    assert '"swizzle":16' in (tmp_path / "toy.program.json").read_text()
    assert problems("toy", tmp_path, tmp_path) == []


# measurement on another machine


def test_a_change_travels_with_what_it_has_to_beat(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coda_agent.verifier.loading import load

    spec = load(toy, check=False)
    first = program_of(spec, TOY_KERNEL)
    name = make_run(toy, found=measured(spec, first))
    run = runs.reopen(name)
    with run.journal:
        outcome, _, _ = author(run, ["unused", scheduled(16)], None, 1)
        assert isinstance(outcome.report, Checked)
        standing_now = result_of(run.journal, run.spec)
        assert standing_now is not None and isinstance(standing_now.report, Accepted)
    bundle.pack([name], tmp_path / "bundle.json")
    seen: dict[str, Any] = {}

    def measure(spec: Spec, kernel: KernelSource, options: MeasureOptions, **given: Any) -> Measured:
        seen.update(given, program=kernel.program)
        return measured(spec, kernel.program)

    monkeypatch.setattr("coda_agent.verifier.measure.measure", measure)
    bundle_measuring.measure(
        tmp_path / "bundle.json",
        bundle.read(tmp_path / "bundle.json"),
        tmp_path / "results.json",
        MeasureOptions(),
        progress=lambda name: lambda gate, words: None,
    )
    tuned = {case: {0: Schedule(256, 128, False)} for case in ("large", "wide")}
    raced = [Schedule(256, 128, False), Schedule(swizzle=16)]
    assert seen["kept"] == Incumbent(KernelSource(first), tuned, {case: {0: raced} for case in tuned})
    assert seen["program"].schedule == {0: Schedule(swizzle=16)}
    lacking = json.loads((tmp_path / "bundle.json").read_text())
    del lacking["entries"][0]["kept"]["schedules"]["wide"]
    (tmp_path / "lacking.json").write_text(json.dumps(lacking))
    with pytest.raises(InvalidInput, match="lacks a schedule for some step at case wide"):
        bundle_measuring.measure(
            tmp_path / "lacking.json",
            bundle.read(tmp_path / "lacking.json"),
            tmp_path / "none.json",
            MeasureOptions(),
            progress=lambda name: lambda gate, words: None,
        )
    [*bundle.take(tmp_path / "results.json")]
    run = runs.reopen(name)
    with run.journal:
        final, provider, _ = author(run, [], None, 1)
        assert final.authorship.attempts == 2 and not provider.asked


# the decision


@pytest.fixture
def decided(toy: Path) -> Callable[..., None]:
    """Return a function that raises Failed if a change is not to be kept. The arguments are the change's
    speedups over the kept kernel in the cases ``large`` and ``wide``."""
    from authoring import timing

    from coda_agent.verifier.loading import load

    spec = load(toy, check=False)

    def decide_on(*speedups: float) -> None:
        rows = []
        for case, speedup in zip((c for c in spec.cases if c.bench), speedups, strict=True):
            row = timing(case)
            before = tuple((2.0 * speedup * f,) * row.rounds for f in (0.999, 1.0, 1.001))
            kept = compared(before, row.samples["candidate"])
            given = {"samples": row.samples | {KEPT: before}, "ratios": row.ratios | {KEPT: kept}}
            rows.append(row.model_copy(update=given))
        assert all(BASELINE in row.ratios for row in rows)
        decide(spec, program_of(spec, TOY_KERNEL), tuple(rows), {})

    return decide_on


@pytest.mark.parametrize("speedups", [(1.05, 1.0), (1.01, 1.01), (1.05, 0.999)])
def test_faster_somewhere_and_slower_nowhere_is_kept(
    decided: Callable[..., None], speedups: tuple[float, float]
) -> None:
    decided(*speedups)


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ((1.0, 1.0), "no case is faster beyond doubt"),
        ((1.001, 1.002), "no case is faster beyond doubt"),
        ((1.2, 0.99), "it is slower, or may be by more than 1%, on wide"),
        ((0.9, 0.9), "it is slower, or may be by more than 1%, on large, wide"),
    ],
)
def test_what_is_not_faster_is_not_kept(
    decided: Callable[..., None], speedups: tuple[float, float], words: str
) -> None:
    with pytest.raises(Failed, match=words) as caught:
        decided(*speedups)
    assert caught.value.code == "no_faster" and f"{speedups[0]:.3f}x" in caught.value.message
    assert [row["case"] for row in caught.value.evidence["timings"]] == ["large", "wide"]
