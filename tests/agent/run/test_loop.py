"""The loop: the messages to an author, the end of a run, and the continuation of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authoring import (
    BROKEN,
    HEADER,
    TOY_KERNEL,
    TURNED,
    TWICE,
    UNSCALED,
    USAGE,
    Notes,
    Scripted,
    fenced,
    measured,
    program_of,
    slow,
    write_toy,
)

from coda_agent.agent.providers import ProviderError, Question, Turn, Usage
from coda_agent.agent.run import assembly, runs
from coda_agent.agent.run.loop import Loop, Outcome, _same, extract, result_of
from coda_agent.primitives.compiler.kernel_source import KernelSource
from coda_agent.verifier.report import Accepted, Checked, Measured, Rejected, joined
from coda_agent.verifier.spec.model import Spec

GOOD, BAD, WRONG = fenced(TOY_KERNEL), fenced(BROKEN), fenced(UNSCALED)


@pytest.fixture
def begin(runs_home: Path, tmp_path: Path, no_compiler: None) -> Callable[..., runs.Run]:
    return lambda **options: runs.start(write_toy(tmp_path), HEADER | options)


def author(run: runs.Run, provider: Scripted, **options: Any) -> Outcome:
    return Loop(run.journal, run.spec, assembly.task_of(run), provider, Notes(), **options).run()


def keys(run: runs.Run) -> list[str]:
    return [event.key for event in run.journal.events()]


def fast(spec: Spec, kernel: KernelSource, keep: object = None, kept: object = None) -> Measured:
    return measured(spec, kernel.program)


# what an answer holds


def test_the_last_block_counts() -> None:
    assert extract("```python\na = 1\n```\nbetter:\n```python\na = 2\n```\n") == "a = 2\n"
    assert extract("```py\na = 3\n```") == "a = 3\n"


@pytest.mark.parametrize(
    "answer", ["", "no code", "```yaml\na: 1\n```", "```python\nnever closed", "`python`"]
)
def test_no_block(answer: str) -> None:
    assert extract(answer) is None


# how a run ends


def test_checked_on_the_first_attempt(begin: Callable[..., runs.Run]) -> None:
    run, notes = begin(), Notes()
    with run.journal:
        outcome = Loop(run.journal, run.spec, assembly.task_of(run), Scripted([GOOD]), notes).run()
    assert isinstance(outcome.report, Checked) and outcome.source == TOY_KERNEL
    assert [g.gate for g in outcome.report.gates] == ["trace", "contract", "interpret", "compile"]
    assert outcome.kernel is not None and outcome.kernel.program.hash == outcome.report.identity.program_hash
    assert outcome.authorship.author == "Ada via a script" and outcome.authorship.attempts == 1
    assert outcome.usage == USAGE
    assert (notes.attempts, notes.reports) == ([1], ["checked"])
    assert notes.gates[::2] == [f"{g} started" for g in ("trace", "contract", "interpret", "compile")]


def test_the_author_is_given_the_spec_and_then_the_reason(begin: Callable[..., runs.Run]) -> None:
    run, provider = begin(), Scripted([BAD, WRONG, GOOD])
    with run.journal:
        outcome = author(run, provider)
        assert isinstance(outcome.report, Checked) and outcome.authorship.attempts == 3
        assert outcome.usage == Usage(300, 30, 3000, 3)
        assert keys(run) == ["prompt", *(f"{kind}/{n}" for n in (1, 2, 3) for kind in ("answer", "report"))]
    systems = {system for system, _ in provider.asked}
    assert len(systems) == 1  # a changed text would miss the provider's cache
    first, second, third = (messages for _, messages in provider.asked)
    assert [m.role for m in third] == ["user", "assistant", "user", "assistant", "user"]
    assert third[:3] == second and second[:1] == first and run.text.strip() in first[0].text
    assert second[1].text == BAD


def test_feedback_has_gate_code_line_and_message(begin: Callable[..., runs.Run]) -> None:
    run, provider = begin(), Scripted([BAD, WRONG, GOOD])
    with run.journal:
        author(run, provider)
        rejections = [e.payload["report"] for e in run.journal.events() if e.kind == "report"][:2]
    for rejected, (_, messages) in zip(rejections, provider.asked[1:], strict=True):
        words = messages[-1].text
        assert f"gate `{rejected['gate']}`, reason `{rejected['code']}`" in words
        assert rejected["message"] in words
    traced, interpreted = (messages[-1].text for _, messages in provider.asked[1:])
    assert "`trace`" in traced and "(line 7 of your file)" in traced and "passed before: none" in traced
    assert "`interpret`, reason `numerics`" in interpreted and "output 'c'" in interpreted
    assert "passed before: trace, contract" in interpreted and "line" not in interpreted.partition("\n")[0]


def test_an_answer_without_code_is_an_attempt(begin: Callable[..., runs.Run]) -> None:
    run, provider = begin(), Scripted(["I would rather not.", GOOD])
    with run.journal:
        outcome = author(run, provider)
    assert outcome.authorship.attempts == 2 and isinstance(outcome.report, Checked)
    assert "reason `no_source`" in provider.asked[1][1][-1].text
    assert "```python block" in provider.asked[1][1][-1].text


def test_attempts_are_used_up(begin: Callable[..., runs.Run]) -> None:
    run, provider = begin(), Scripted([BAD, WRONG, GOOD])
    with run.journal:
        outcome = author(run, provider, attempts=2)
        assert isinstance(outcome.report, Rejected) and outcome.report.gate == "interpret"
        assert outcome.source == UNSCALED and outcome.kernel is None
        assert outcome.authorship.attempts == 2 and outcome.usage == USAGE + USAGE
        assert len(provider.asked) == 2
        assert result_of(run.journal, run.spec) == outcome


def test_measured_here(begin: Callable[..., runs.Run]) -> None:
    run, provider = begin(), Scripted([GOOD])
    with run.journal:
        outcome = author(run, provider, measure=fast)
        assert isinstance(outcome.report, Accepted) and outcome.report.timings[0].case == "large"
        assert [g.gate for g in outcome.report.gates][3:6] == ["compile", "numerics", "stability"]
        assert author(run, Scripted([]), measure=_never) == outcome  # read back; nothing is asked or measured
        assert result_of(run.journal, run.spec) == outcome


def _never(spec: Spec, kernel: KernelSource, keep: object, kept: object = None) -> Measured:
    raise AssertionError("measured again")


def test_a_slow_kernel_is_fed_back_and_measured_again_only_when_it_is_another(
    begin: Callable[..., runs.Run],
) -> None:
    found = iter([slow, fast])

    def measure(spec: Spec, kernel: KernelSource, keep: object, kept: object = None) -> Measured | Rejected:
        step = next(found)
        return step(spec) if step is slow else fast(spec, kernel)

    run, provider = begin(), Scripted([GOOD, GOOD, fenced(TURNED)])
    with run.journal:
        outcome = author(run, provider, attempts=3, measure=measure)
        events = {event.key: event.payload for event in run.journal.events()}
    assert isinstance(outcome.report, Accepted) and outcome.authorship.attempts == 3
    assert [events[f"measurement/{n}"]["status"] for n in (1, 2, 3)] == ["rejected", "rejected", "measured"]
    words = provider.asked[1][1][-1].text
    assert "gate `decision`, reason `slow`" in words and "0.900x torch.compile" in words
    assert "passed before: trace, contract, interpret, compile" in words


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("def f(x):\n\n    # once more\n    return x+1\n", True),
        ("def f(x):\n  return x + 1\n", True),
        ("def f(x):\n    return x + 2  # one\n", False),
        ("def f(x):\n    pass\nreturn x + 1\n", False),
        ("", False),
    ],
)
def test_an_edited_text_is_the_same_but_for_comments_and_space(other: str, same: bool) -> None:
    """If a new comment were enough for a new measurement, an author could submit a rejected kernel again and
    again, until a measurement happens to pass."""
    assert _same("def f(x):\n    return x + 1  # one\n", other) is same


# kernels that await measurement elsewhere


def awaiting(run: runs.Run) -> Outcome:
    outcome = author(run, Scripted([GOOD]))
    assert isinstance(outcome.report, Checked) and outcome.kernel is not None
    return outcome


def record(run: runs.Run, found: Measured | Rejected) -> None:
    run.journal.once("measurement/1", "measurement", lambda: found.model_dump(mode="json"))


def test_a_recorded_measurement_carries_the_run_on(begin: Callable[..., runs.Run]) -> None:
    run = begin()
    with run.journal:
        kernel = awaiting(run).kernel
        assert kernel is not None
        record(run, measured(run.spec, kernel.program))
        outcome = author(run, Scripted([]))  # no request is sent
        assert isinstance(outcome.report, Accepted) and outcome.kernel == kernel


def test_a_recorded_rejection_is_fed_back(begin: Callable[..., runs.Run]) -> None:
    run, provider = begin(), Scripted(["unused", fenced(TURNED)])
    with run.journal:
        awaiting(run)
        record(run, slow(run.spec))
        outcome = author(run, provider)
        assert isinstance(outcome.report, Checked) and outcome.authorship.attempts == 2
        assert len(provider.asked) == 1 and "reason `slow`" in provider.asked[0][1][-1].text
        assert outcome.usage == USAGE + USAGE


def test_evidence_of_another_kernel_is_not_joined(begin: Callable[..., runs.Run]) -> None:
    run = begin()
    with run.journal:
        report = awaiting(run).report
        with pytest.raises(ValueError, match="spec, program or lowered text differs"):
            joined(report, measured(run.spec, program_of(run.spec, TWICE)))
        assert joined(report, None) is report
        assert result_of(run.journal, run.spec) is not None


def test_a_run_without_a_report_stands_nowhere(begin: Callable[..., runs.Run]) -> None:
    run = begin()
    with run.journal:
        assert result_of(run.journal, run.spec) is None


# failures on the way


def test_no_answer_leaves_a_run_to_resume(begin: Callable[..., runs.Run]) -> None:
    run = begin()
    fault = ProviderError("no connection", "check the network", retryable=True)
    with run.journal, pytest.raises(ProviderError, match="no connection; check the network"):
        author(run, Scripted([BAD, fault]))
    again = runs.reopen(run.name)
    with again.journal:
        assert keys(again) == ["prompt", "answer/1", "report/1", "stopped/1"]
        assert again.journal.events()[-1].payload == {"reason": str(fault)}
        provider = Scripted(["never asked for", GOOD])
        outcome = author(again, provider)
        assert isinstance(outcome.report, Checked) and len(provider.asked) == 1
        assert [m.text for m in provider.asked[0][1][1:2]] == [BAD]


def test_an_answer_that_was_not_judged_yet_is_judged_whatever_the_limit(
    begin: Callable[..., runs.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    with run.journal:
        author(run, Scripted([BAD]), attempts=1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Loop, "_judged", _interrupted_at_2(Loop._judged))
            author(run, Scripted(["never asked for", GOOD]), attempts=2)
        assert keys(run)[-2:] == ["answer/2", "stopped/1"]
    again = runs.reopen(run.name)
    with again.journal:
        assert isinstance(author(again, Scripted([]), attempts=1).report, Checked)


def _interrupted_at_2(judged: Callable[..., Outcome]) -> Callable[..., Outcome]:
    def judge(loop: Loop, number: int, *given: Any) -> Outcome:
        if number == 2:
            raise KeyboardInterrupt
        return judged(loop, number, *given)

    return judge


def test_no_answer_in_a_round_leaves_the_accepted_kernel(begin: Callable[..., runs.Run]) -> None:
    run, fault = begin(), ProviderError("no connection", "check the network", retryable=True)
    with run.journal:
        outcome = author(run, Scripted([GOOD, BAD, fault]), measure=fast, improve=3)
        assert isinstance(outcome.report, Accepted) and outcome.source == TOY_KERNEL
        assert outcome.stopped == str(fault) and outcome.usage == USAGE + USAGE
        assert keys(run)[-1] == "stopped/1"
        again = author(run, Scripted(["unused", "unused", BAD]), measure=fast, improve=2)
        assert isinstance(again.report, Accepted) and not again.stopped
        assert keys(run)[-2:] == ["answer/3", "report/3"]


def test_an_interruption_is_written_down_each_time(begin: Callable[..., runs.Run]) -> None:
    run = begin()
    with run.journal:
        for number in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                author(run, Scripted([KeyboardInterrupt()]))
            event = run.journal.events()[-1]
            assert (event.key, event.kind) == (f"stopped/{number}", "stopped")
            assert event.payload == {"reason": "interrupted"}
        assert isinstance(author(run, Scripted([GOOD])).report, Checked)


def test_an_interruption_on_a_full_disk_is_one(begin: Callable[..., runs.Run]) -> None:
    run = begin()

    class Interrupted(Scripted):
        def next_turn(self, question: Question) -> Turn:
            run.journal._db.execute("PRAGMA max_page_count = 1")  # SQLite then fails as on a full disk
            raise KeyboardInterrupt

    with run.journal, pytest.raises(KeyboardInterrupt):
        author(run, Interrupted([]))


def test_a_run_stands_where_it_was_taken_whatever_it_may_do_now(begin: Callable[..., runs.Run]) -> None:
    """A run that was resumed with more attempts and rounds keeps all its results. A later command with lower
    limits returns the same outcome."""
    run = begin()
    with run.journal:
        author(run, Scripted([BAD, WRONG, BAD]), attempts=3)
        assert author(run, Scripted([]), attempts=1).authorship.attempts == 3
        further = author(run, Scripted(["unused"] * 3 + [GOOD, BAD]), attempts=4, measure=fast, improve=1)
        assert isinstance(further.report, Accepted) and keys(run)[-1] == "report/5"
        assert author(run, Scripted([]), attempts=1) == further == result_of(run.journal, run.spec)


def test_the_prompt_of_a_resumed_run_is_the_first_ones(
    begin: Callable[..., runs.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    with run.journal, pytest.raises(ProviderError):
        author(run, Scripted([ProviderError("no answer", "wait")]))
    monkeypatch.setattr("coda_agent.agent.prompts.prompt.ROLE", "another version's words")
    again, provider = runs.reopen(run.name), Scripted([GOOD])
    with again.journal:
        author(again, provider)
    assert "another version's words" not in provider.asked[0][0]
