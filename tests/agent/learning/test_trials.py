"""Measuring tips: both arms get the same specs equally often, an interval decides the verdict, and a second
call continues with the runs of the first call."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from authoring import BROKEN, SPECS, TOY_KERNEL, USAGE, fenced, write_toy
from rich.console import Console
from typer.testing import CliRunner, Result

from coda_agent.agent import setup, tips
from coda_agent.agent.cli.main import app
from coda_agent.agent.learning.trials import Effect, TipMeasurement, measure, part, refuse_without_effect
from coda_agent.agent.learning.watch import QuietView
from coda_agent.agent.providers import OutOfBudget, ProviderError, Question, Turn
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.budget import RunLimits
from coda_agent.agent.storage.journal import glance
from coda_agent.agent.tips import PROPOSED, RETIRED, Tip, TipsError, read_tips
from coda_agent.verifier.report import Unmeasured

PAIR = [SPECS / "gemm_rope.yaml", SPECS / "gemm_geglu.yaml"]


def tip(number: int, **fields: str) -> Tip:
    return replace(
        Tip(f"tip-{number}", f"Lesson {number}", "elsewhere", "trace/python", "as said", "1"), **fields
    )


KNOWN = [tip(1), tip(2, state=PROPOSED), tip(3), tip(4, state=RETIRED)]


@dataclass
class Fake:
    """A fake author. ``needs[True]`` lists how many attempts each run with the tip needs, and
    ``needs[False]`` how many each run without the tip needs. None: the run never passes. ``asked`` records
    the spec and the tips of each run."""

    measured: str
    needs: dict[bool, list[int | None]]
    asked: list[tuple[str, list[str]]] = field(default_factory=list)

    def __call__(self, spec: Path, given: Sequence[Tip]) -> int | None:
        ids = [tip.id for tip in given]
        self.asked.append((spec.stem, ids))
        return self.needs[self.measured in ids].pop(0)


def steady(measured: str, with_tip: int | None = 1, without: int | None = 1) -> Fake:
    return Fake(measured, {True: [with_tip] * 99, False: [without] * 99})


# the comparison


def test_both_arms_have_the_same_specs_as_often_and_take_turns() -> None:
    author = steady("tip-1")
    measure(KNOWN[0], KNOWN, PAIR, 4, author)
    with_tip, without = ["tip-1", "tip-3"], ["tip-3"]
    for spec in PAIR:
        for arm in (with_tip, without):
            assert author.asked.count((spec.stem, arm)) == 4
    pairs = list(zip(author.asked[::2], author.asked[1::2], strict=True))
    assert all(one[0] == other[0] and one[1] != other[1] for one, other in pairs)
    for spec in PAIR:  # each arm goes first equally often
        assert sum(one[1] == with_tip for one, _ in pairs if one[0] == spec.stem) == 2


@pytest.mark.parametrize("measured", [KNOWN[1], KNOWN[3]])
def test_a_tip_that_is_not_accepted_is_measured_beside_those_that_are(measured: Tip) -> None:
    given: list[Sequence[Tip]] = []

    def author(spec: Path, tips: Sequence[Tip]) -> int | None:
        given.append(tips)
        return 1

    measure(measured, KNOWN, PAIR[:1], 1, author)
    with_tip, without = given
    assert {t.id for t in with_tip} == {"tip-1", "tip-3", measured.id} and {t.id for t in without} == {
        "tip-1",
        "tip-3",
    }
    assert {t.state for t in with_tip} == {"accepted"}


def test_first_attempts_and_the_limit_are_counted_apart() -> None:
    author = Fake("tip-1", {True: [1, 2, 1, 1, None], False: [1, None, 3, 1, None]})
    trial = measure(KNOWN[0], KNOWN, PAIR[:1], 5, author)
    assert (trial.first, trial.within) == (Effect(3, 2, 5), Effect(4, 3, 5))
    # Wilson's intervals on the first attempt: 3/5 [0.2307, 0.8824], 2/5 [0.1176, 0.7693];
    # within the limit: 4/5 [0.3755, 0.9638], 3/5 [0.2307, 0.8824]
    assert str(trial) == (
        "undecided: 3/5 with, 2/5 without, difference +0.20 [-0.32, +0.60] on the first attempt; within the "
        "limit undecided: 4/5 with, 3/5 without, difference +0.20 [-0.31, +0.60]"
    )


@pytest.mark.parametrize(
    ("with_tip", "without", "of", "verdict"),
    [  # Newcombe 1998, table II: 9/10 - 3/10 [0.1705, 0.8090], 6/7 - 2/7 [0.0582, 0.8062]
        (9, 3, 10, "helps"),
        (3, 9, 10, "hurts"),
        (6, 2, 7, "helps"),
        (5, 2, 7, "undecided"),
        (2, 5, 7, "undecided"),
        (1, 0, 1, "undecided"),
        (0, 0, 50, "undecided"),
        (50, 50, 50, "undecided"),
    ],
)
def test_a_verdict_takes_an_interval_without_zero(with_tip: int, without: int, of: int, verdict: str) -> None:
    effect = Effect(with_tip, without, of)
    assert effect.verdict == verdict
    trial = TipMeasurement(effect, Effect(of, 0, of))
    assert trial.first.verdict == verdict
    written = tip(1, measured=str(trial))  # the log can read the figures that a trial writes
    assert (written.verdict, written.difference) == (verdict, round(effect.difference.estimate, 2))


def test_runs_share_a_budget_equally() -> None:
    whole = RunLimits(tokens=1_000_000, dollars=5.0, gpu_seconds=600.0, seconds=3600.0)
    assert part(whole, 20) == RunLimits(50_000, 0.25, 30.0, 180.0)
    # A later call for more runs, with a larger budget, reuses earlier runs only if the parts are equal.
    assert part(RunLimits(dollars=0.3), 3) == part(RunLimits(dollars=0.1), 1)
    assert part(RunLimits(), 20) == RunLimits()


def test_prompts_that_would_be_the_same_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for measured, specs, words in (
        (
            tip(1, spec="a, gemm_geglu"),
            PAIR,
            "gemm_geglu.yaml: tip-1 was learned on gemm_geglu, whose prompt",
        ),
        (KNOWN[0], [], "tip-1: no spec to measure it on"),
        (tip(1, level="cutedsl"), PAIR, "tip-1: only prompts for CuTeDSL edits"),
    ):
        with pytest.raises(TipsError, match=words):
            refuse_without_effect(measured, KNOWN, specs)
    monkeypatch.setattr("coda_agent.agent.prompts.prompt.BUDGET", 4000)
    with pytest.raises(TipsError, match="the prompt's budget has no room for tip-1"):
        refuse_without_effect(KNOWN[0], KNOWN, PAIR)


# the command, with real runs

LESSON = "Give gemm both operands"


@dataclass
class Taught:
    """A provider whose first answer is right only if the prompt contains the lesson. All later answers are
    right."""

    asked: list[str]
    fails_after: int | None = None
    failure: Exception = field(default_factory=lambda: ProviderError("no answer", "try again"))

    name = "taught"

    def next_turn(self, question: Question) -> Turn:
        if len(self.asked) == self.fails_after:
            self.fails_after = None
            raise self.failure
        self.asked.append(question.system)
        right = LESSON in question.system or question.number > 1
        return Turn(fenced(TOY_KERNEL if right else BROKEN), USAGE, "Ada via a script", "end_turn")


@pytest.fixture
def taught(runs_home: Path, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> Taught:
    log = tmp_path / "tips.md"
    fields = "- spec: elsewhere\n- failed: trace/python\n- fix: gave both\n- versions: 1\n"
    log.write_text(f"## tip-1: {LESSON}\n{fields}\n## tip-2: Be brief\n{fields}- state: proposed\n")
    monkeypatch.setattr(tips, "TIPS", log)
    provider = Taught([])
    monkeypatch.setattr(assembly, "provider_of", lambda run: provider)
    write_toy(tmp_path)
    return provider


def command(directory: Path, *arguments: object) -> Result:
    options = ["--provider", "claude-code", "--attempts", "2", "--specs", str(directory / "toy.yaml")]
    return CliRunner().invoke(app, ["tips", "measure", *options, *map(str, arguments)])


def headers() -> list[dict[str, Any]]:
    return [glance(runs.runs_dir() / name / "journal.db")[0] for name in runs.names()]


def test_a_tip_is_measured_by_real_runs(taught: Taught, tmp_path: Path) -> None:
    result = command(tmp_path, "tip-1", "--runs", 2)
    assert result.exit_code == 0, result.output + repr(result.exception)
    with_tip = [header for header in headers() if header["without_tips"] == []]
    without = [header for header in headers() if header["without_tips"] == ["tip-1"]]
    assert (len(with_tip), len(without)) == (2, 2)
    assert {header["attempts"] for header in headers()} == {2}
    assert sum(LESSON in system for system in taught.asked) == 2
    assert sum(LESSON not in system for system in taught.asked) == 4  # two attempts for each run
    for header in headers():
        _, events = glance(runs.runs_dir() / header["run"] / "journal.db")
        asked = next(e.payload for e in events if e.kind == "prompt")
        assert (LESSON in asked["system"]) == (header["without_tips"] == [])
    # Wilson's intervals are [0.3424, 1] for 2/2 and [0, 0.6576] for 0/2. So the low end of the difference's
    # interval is 1 - sqrt(2) * 0.6576 = 0.07.
    figures = "helps: 2/2 with, 0/2 without, difference +1.00 [+0.07, +1.00] on the first attempt"
    first, second = read_tips(tips.TIPS)
    assert first.measured.startswith(figures) and figures in result.output and second.measured == ""
    assert first.measured.endswith(
        "within the limit undecided: 2/2 with, 2/2 without, difference +0.00 [-0.66, +0.66]; on toy, by "
        "claude-code"
    )


def test_a_run_is_one_line_and_no_draft_is_printed(taught: Taught, tmp_path: Path) -> None:
    result = command(tmp_path, "tip-1", "--runs", 2)
    named = [f"({name})" for name in runs.names()]
    assert result.stdout.splitlines()[:-1] == [
        "4 runs: 2 with the tip and 2 without",
        f"1/4 toy with tip-1: passed at attempt 1 {named[0]}",
        f"2/4 toy without tip-1: passed at attempt 2 {named[1]}",
        f"3/4 toy without tip-1: passed at attempt 2 {named[2]}",
        f"4/4 toy with tip-1: passed at attempt 1 {named[3]}",
    ]
    assert result.stderr == ""


def test_a_handoffs_prompt_is_named(tmp_path: Path) -> None:
    for speaks, shown in ((True, "  prompt-1.md awaits its answer\n"), (False, "")):
        console = Console(file=io.StringIO(), width=20)
        with QuietView(console, speaks) as watch:
            watch.attempt(1, 6)
            watch.text("prompt-1.md awaits ")
            watch.text("its answer\n")
            watch.gate("trace", "passed")
        assert isinstance(console.file, io.StringIO) and console.file.getvalue() == shown


def test_a_budget_is_that_of_all_runs(taught: Taught, tmp_path: Path) -> None:
    given = ["--budget-tokens", 100_000, "--budget-dollars", 1, "--budget-seconds", 2000]
    given += ["--model", "claude-opus-4-5"]  # its price is needed to reserve dollars
    result = command(tmp_path, "tip-1", "tip-2", "--runs", 2, *given)
    assert "8 runs: 2 tips x 2 with the tip and 2 without; each may cost 12,500 tokens, $0.125, 250 s" in (
        result.stdout
    )
    assert [header["limits"] for header in headers()] == [
        {"tokens": 12_500, "dollars": 0.125, "seconds": 250.0}
    ] * 8
    said = " ".join(CliRunner().invoke(app, ["tips", "measure", "--help"]).output.split())
    assert "A budget is for all runs together, and each run gets an equal part of it." in said


def test_a_proposed_tip_is_in_the_runs_with_it_alone(taught: Taught, tmp_path: Path) -> None:
    given = ["--provider", "handoff", "--author", "Ada"]
    assert command(tmp_path, "tip-2", "--runs", 1, *given).exit_code == 0
    assert read_tips(tips.TIPS)[1].measured.endswith("; on toy, by handoff (Ada)")
    assert sorted((h["without_tips"], h["with_tips"]) for h in headers()) == [([], []), ([], ["tip-2"])]
    assert sorted("- Be brief" in system for system in taught.asked) == [False, True]
    assert read_tips(tips.TIPS)[1].state == PROPOSED  # only a person accepts a tip


def test_a_second_call_goes_on_where_the_first_was_cut_off(taught: Taught, tmp_path: Path) -> None:
    taught.fails_after = 4
    cut = command(tmp_path, "tip-1", "--runs", 2)
    assert isinstance(cut.exception, ProviderError) and read_tips(tips.TIPS)[0].measured == ""
    assert "repeat the command to continue" in cut.stderr
    begun = runs.names()
    assert command(tmp_path, "tip-1", "--runs", 2).exit_code == 0
    assert len(taught.asked) == 6 and set(begun) < set(runs.names()) and len(runs.names()) == 4
    measured = read_tips(tips.TIPS)[0].measured
    assert command(tmp_path, "tip-1", "--runs", 2).exit_code == 0
    assert len(taught.asked) == 6 and read_tips(tips.TIPS)[0].measured == measured
    assert command(tmp_path, "tip-1", "--runs", 3).exit_code == 0
    assert len(runs.names()) == 6 and "3/3 with, 0/3 without" in read_tips(tips.TIPS)[0].measured


def test_runs_with_another_prompt_or_limit_are_not_counted(taught: Taught, tmp_path: Path) -> None:
    command(tmp_path, "tip-1", "--runs", 1)
    assert command(tmp_path, "tip-1", "--runs", 1, "--model", "other").exit_code == 0
    assert len(runs.names()) == 4
    assert command(tmp_path, "tip-1", "--runs", 1, "--budget-tokens", 10**6).exit_code == 0
    assert len(runs.names()) == 6
    tips.TIPS.write_text(tips.TIPS.read_text().replace(LESSON, f"{LESSON}, always"))
    assert command(tmp_path, "tip-1", "--runs", 1).exit_code == 0
    assert len(runs.names()) == 7  # the run without the tip is reused, because its prompt is the same


def test_a_run_that_cannot_be_read_is_in_nobodys_way(taught: Taught, tmp_path: Path, runs_home: Path) -> None:
    (runs_home / "damaged").mkdir(parents=True)
    (runs_home / "damaged" / "journal.db").write_bytes(b"no database" * 99)
    assert command(tmp_path, "tip-1", "--runs", 1).exit_code == 0


def test_a_recording_cannot_tell(taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "choose_provider", lambda name, spec: name)
    arguments = ["tips", "measure", "tip-1", "--specs", str(tmp_path / "toy.yaml"), "--provider", "replay"]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, TipsError) and "a recording answers the same with a tip" in str(error)
    assert runs.names() == []


def test_a_budget_that_ends_a_run_is_no_pass(taught: Taught, tmp_path: Path) -> None:
    result = command(tmp_path, "tip-1", "--runs", 1, "--budget-tokens", 2 * USAGE.total)
    # Each run gets half of the budget, which pays for the run's first answer, but not for the second.
    assert len(taught.asked) == 2
    assert "without tip-1: did not pass: the run's part of the budget ended it after 1 attempt (" in (
        result.output
    )
    assert "within the limit undecided: 1/1 with, 0/1 without" in read_tips(tips.TIPS)[0].measured


def test_a_run_that_its_budget_ends_before_any_answer_is_no_pass(taught: Taught, tmp_path: Path) -> None:
    taught.fails_after, taught.failure = 0, OutOfBudget("too little for one answer")
    result = command(tmp_path, "tip-1", "--runs", 1)  # the error ends the first run, which has the tip
    assert result.exit_code == 0 and "with tip-1: did not pass" in result.output
    assert read_tips(tips.TIPS)[0].measured.startswith("undecided: 0/1 with, 0/1 without")


def test_a_budget_that_buys_no_answer_gives_no_verdict(taught: Taught, tmp_path: Path) -> None:
    error = command(tmp_path, "tip-1", "--runs", 1, "--budget-tokens", 1).exception
    assert isinstance(error, TipsError) and "no run's part of the budget was enough" in str(error)
    assert taught.asked == [] and read_tips(tips.TIPS)[0].measured == ""


def test_a_budget_that_an_author_cannot_reach_is_refused(taught: Taught, tmp_path: Path) -> None:
    result = command(tmp_path, "tip-1", "--provider", "handoff", "--budget-tokens", 10**6)
    assert result.exit_code == 2 and runs.names() == []


def test_what_cannot_be_measured_is_refused_before_any_run(taught: Taught, tmp_path: Path) -> None:
    log = tips.TIPS.read_text()
    tips.TIPS.write_text(
        log.replace(
            "- spec: elsewhere\n- failed: trace/python\n- fix: gave both\n- versions: 1\n- state",
            "- spec: toy\n- failed: trace/python\n- fix: gave both\n- versions: 1\n- state",
        )
    )
    error = command(tmp_path, "tip-1", "tip-2", "--runs", 1).exception
    assert isinstance(error, TipsError) and "tip-2 was learned on toy" in str(error)
    error = command(tmp_path, "tip-1", "specs/more.yaml").exception
    assert isinstance(error, TipsError) and "write --specs before each spec" in str(error)
    assert runs.names() == []


def test_on_a_gpu_only_what_was_measured_has_passed(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    void = Unmeasured(reason="the worker was lost")
    monkeypatch.setattr(setup, "need_gpu", lambda gpu: None)
    monkeypatch.setattr(setup, "measurer", lambda gpu, options, watch: lambda *_: void)
    result = command(tmp_path, "tip-1", "--runs", 1, "--gpu")
    assert "1/2 toy with tip-1: did not pass: its kernel of attempt 1 was not measured (" in result.output
